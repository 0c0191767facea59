"""The night: propose, judge, keep or revert, record, and measure the model after each keep."""

from dataclasses import dataclass
from enum import StrEnum

from agent.between import Between
from agent.errors import MachineError, StopRequestedError
from agent.executors.bench import Bench
from agent.experiment import close, finish
from agent.gpu import GpuLostError
from agent.journal import Decision
from agent.opening import open_branch_of
from agent.places import write_whole
from agent.policy import DEVICE_LOST
from agent.preflight import preflight
from agent.proposing import hand_out
from agent.records import ExperimentState, RowStatus
from agent.seating import open_bench
from agent.session import STOPPED_ON_REQUEST, Session, forget_changed_targets
from agent.settling import is_winner, prove_next, settle
from agent.unwell import park_unwell, words_of
from harness import wire


class Ending(StrEnum):
    """How a run ended."""

    BUDGET = "budget reached"
    STOPPED = "stopped"
    EXHAUSTED = "nothing left to try"
    NOTHING = "nothing to optimise"


@dataclass(frozen=True)
class Outcome:
    """A run's end and its one-sentence reason."""

    ending: Ending
    reason: str


def night(session: Session) -> Outcome:
    """The whole night. Raises MachineError (resumable) when the environment fails, InputError for the user's part."""
    try:
        with open_bench(session) as bench:
            between = Between(session)
            session.journal.start_run()
            preflight(session, bench)
            prepare(session, bench)
            return rounds(session, bench, between)
    except StopRequestedError:
        return Outcome(Ending.STOPPED, STOPPED_ON_REQUEST)


def rounds(session: Session, bench: Bench, between: Between) -> Outcome:
    """The bench has work while there are ideas and budget; each answer is settled as it comes."""
    try:
        while True:
            between.look(bench)
            reason, paused = session.stop_reason(bench.thinking), between.paused
            if reason is None and not paused and bench.room and hand_out(session, bench):
                continue
            if not bench.busy and reason is None and paused:
                between.rest(bench)
                continue
            if not bench.busy:
                return ended(session, reason or session.reached or None)
            number = settle(session, bench, bench.wait())
            park_unwell(session, number)
    except GpuLostError as error:
        lose(session, str(error))
        raise
    except (StopRequestedError, MachineError):
        interrupt(session)
        raise


def prepare(session: Session, bench: Bench) -> None:
    """Profile once, make the branch ready, and settle what a kill left half done."""
    session.parked.update(session.journal.unjudgeable())
    if session.report is None:
        session.say(f"profiling {session.options.model.reference}")
        session.report = session.harness.profile(session.options.model, session.places.folder)
        before = session.places.read_profile_before()
        if before:
            forget_changed_targets(session.journal, before, session.report)
        write_whole(session.places.profile, wire.to_json(session.report))
        session.show.ranking(session.report)
    open_branch_of(session)
    reconcile(session, bench)


def reconcile(session: Session, bench: Bench) -> None:
    """Close every experiment that a kill left open: cut off ones are marked, judged ones decided, not judged again."""
    left = [one for one in session.journal.experiments() if one.state is not ExperimentState.RECORDED]
    for one in left:
        if one.state is ExperimentState.PROPOSED and one.candidate:
            session.store_source(one.number, one.candidate)
        if not is_winner(one):
            finish(session, one.number, cut_off=True)
    prove_next(session, bench)
    while bench.busy:
        settle(session, bench, bench.wait())
    for one in left:
        outcome = next(after.status for after in session.journal.experiments() if after.number == one.number)
        again = "; the same candidate is judged again next" if outcome is RowStatus.INTERRUPTED else ""
        session.say(f"experiment {one.number} was left {one.state} by the run before: now {outcome}{again}")


def lose(session: Session, reason: str) -> None:
    """Say of what was being judged that its device is gone; each is judged once more on resume."""
    for one in session.journal.experiments():
        if one.state is ExperimentState.PROPOSED:
            close(session, one.number, one.candidate, Decision(RowStatus.ENVIRONMENT, f"{DEVICE_LOST}: {reason}"))


def interrupt(session: Session) -> None:
    """Mark what a stop cut off; judged experiments keep their verdict and are decided on resume."""
    for one in session.journal.experiments():
        if one.state is ExperimentState.PROPOSED:
            finish(session, one.number, cut_off=True)


def ended(session: Session, reason: str | None) -> Outcome:
    """How the night ended once nothing is left to wait for: a stop or a budget, or no idea for any target."""
    if reason is None:
        return _exhausted(session)
    return Outcome(Ending.STOPPED if reason == STOPPED_ON_REQUEST else Ending.BUDGET, reason)


def _exhausted(session: Session) -> Outcome:
    experiments = session.journal.experiments()
    last = experiments[-len(session.devices) :]
    if last and all(one.status is RowStatus.ENVIRONMENT for one in last):
        raise MachineError(f"No target is left that this machine can judge: {words_of(experiments[-1])}")
    if experiments:
        return Outcome(Ending.EXHAUSTED, "every target is at its bound, parked or out of ideas")
    return Outcome(Ending.NOTHING, "the profile shows no target that any kernel could improve")

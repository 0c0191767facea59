"""The night: propose, judge, keep or revert, record, and measure the model after each keep."""

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from agent import ranking
from agent.errors import MachineError, StopRequestedError
from agent.executors.bench import Bench
from agent.experiment import begin, finish
from agent.opening import open_branch_of
from agent.places import write_whole
from agent.proposers.base import Ordered
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, NothingLeft, RowStatus
from agent.seating import open_bench
from agent.session import Session, forget_changed_targets
from agent.settling import is_winner, prove_next, settle
from harness import wire
from harness.records import Target

ENVIRONMENT_STREAK = 3
UNRELIABLE_STREAK = 6  # a busy machine may calm down: it gets more chances, and time
TARGET_ENVIRONMENT_STREAK = 2
UNRELIABLE_WAIT_S = 10.0


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
            prepare(session, bench)
            return rounds(session, bench)
    except StopRequestedError:
        return Outcome(Ending.STOPPED, "stopped on request")


def rounds(session: Session, bench: Bench) -> Outcome:
    """Every seat of the bench has a candidate while there are ideas and budget; each answer is settled as it comes."""
    try:
        while True:
            reason = session.stop_reason()
            proposal = next_proposal(session) if reason is None and bench.room else None
            if proposal is not None:
                begin(session, bench, proposal)
            elif bench.busy:
                number = settle(session, bench, bench.wait())
                park_unwell(session, number)
            else:
                return ended(session, reason)
    except (StopRequestedError, MachineError):
        interrupt(session)
        raise


def prepare(session: Session, bench: Bench) -> None:
    """Profile once, make the branch ready, and settle what a kill left half done."""
    session.journal.start_run()
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


def interrupt(session: Session) -> None:
    """Mark what a stop cut off; judged experiments keep their verdict and are decided on resume."""
    for one in session.journal.experiments():
        if one.state is ExperimentState.PROPOSED:
            finish(session, one.number, cut_off=True)


def next_proposal(session: Session) -> Candidate | InvalidReply | None:
    """What to judge next: a candidate that was cut off, else the proposer's idea for the best target."""
    owed = session.owed()
    if owed:
        return owed[0].candidate
    passed: set[str] = set()
    while (target := choose_target(session, passed)) is not None:
        brief = session.brief(target)
        proposal = session.proposer.propose(brief)
        if not isinstance(proposal, NothingLeft):
            return proposal
        passed.add(target.id)
        if not brief.in_flight:  # what is being judged may give it new ideas
            session.parked.add(target.id)
            session.say(f"{target.id} is parked: {proposal.reason}")
    return None


def choose_target(session: Session, passed: AbstractSet[str] = frozenset()) -> Target | None:
    """The ranking's choice, or that of a proposer with an order of its own (replay)."""
    experiments, parked = session.experiments(), frozenset(session.parked | passed)
    if isinstance(session.proposer, Ordered):
        playable = [target for target in session.targets if target.id not in parked]
        return session.proposer.next_target(playable, experiments)
    seconds = session.journal.judge_seconds()
    rested = ranking.next_target(session.targets, experiments, parked | ranking.resting(experiments), seconds)
    return rested or ranking.next_target(session.targets, experiments, parked, seconds)


def ended(session: Session, reason: str | None) -> Outcome:
    """How the night ended once nothing is left to wait for: a stop or a budget, or no idea for any target."""
    if reason is None:
        return _exhausted(session)
    return Outcome(Ending.STOPPED if session.harness.stop() else Ending.BUDGET, reason)


def _exhausted(session: Session) -> Outcome:
    experiments = session.journal.experiments()
    if experiments and experiments[-1].status is RowStatus.ENVIRONMENT:
        raise MachineError(f"No target is left that this machine can judge: {_words_of(experiments[-1])}")
    if experiments:
        return Outcome(Ending.EXHAUSTED, "every target is at its bound, parked or out of ideas")
    return Outcome(Ending.NOTHING, "the profile shows no target that any kernel could improve")


def park_unwell(session: Session, number: int) -> None:
    """Environment failures of one target park it; a streak of them over several targets is the machine's: stop.

    A machine too busy to measure on is given time between tries, and more of them.
    """
    experiments = [one for one in session.journal.experiments() if one.status is not None]
    streak = ranking.environment_streak(experiments)
    if number not in {one.number for one in streak}:
        return
    target = next(one.target for one in streak if one.number == number)
    busy = all(ranking.is_unreliable(one) for one in streak)
    mine = [one for one in experiments if one.target == target][-TARGET_ENVIRONMENT_STREAK:]
    if len(mine) == TARGET_ENVIRONMENT_STREAK and _all_environment(mine) and not busy:
        session.parked.add(target)
        session.say(f"{target} is parked: {_words_of(mine[-1])}")
    several = busy or len({one.target for one in streak}) > 1
    if several and len(streak) >= (UNRELIABLE_STREAK if busy else ENVIRONMENT_STREAK):
        reason = _words_of(streak[-1])
        raise MachineError(f"{len(streak)} experiments in a row failed because of the machine: {reason}.")
    if busy:
        _wait(session, UNRELIABLE_WAIT_S * len(streak))


def _wait(session: Session, seconds: float) -> None:
    session.say(f"the machine is too busy to measure on: waiting {seconds:.0f} s")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not session.harness.stop():
        time.sleep(0.1)


def _all_environment(experiments: Sequence[Experiment]) -> bool:
    return all(one.status is RowStatus.ENVIRONMENT for one in experiments)


def _words_of(one: Experiment) -> str:
    return one.verdict.detail if one.verdict else one.detail

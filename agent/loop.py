"""The night: propose, judge, keep or revert, record, and measure the model after each keep."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent import ranking
from agent.errors import MachineError, StopRequestedError
from agent.experiment import examine, finish, open_experiment, settle_unjudged
from agent.measuring import Judge
from agent.opening import open_branch_of
from agent.places import write_whole
from agent.proposers.base import Ordered
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, NothingLeft, RowStatus
from agent.session import Session, forget_changed_targets
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
    judge, prepared = Judge(session), False
    try:
        prepare(session)
        prepared = True
        while (reason := session.stop_reason()) is None:
            proposal = next_proposal(session)
            if proposal is None:
                return _exhausted(session)
            number = open_experiment(session, proposal)
            if isinstance(proposal, Candidate) and not settle_unjudged(session, number, proposal):
                examine(session, judge, number, proposal)
            finish(session, number)
            park_unwell(session, proposal.target)
        return Outcome(Ending.STOPPED if session.harness.stop() else Ending.BUDGET, reason)
    except StopRequestedError:
        if prepared:
            interrupt(session)
        return Outcome(Ending.STOPPED, "stopped on request")
    finally:
        judge.close()


def prepare(session: Session) -> None:
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
    reconcile(session)


def reconcile(session: Session) -> None:
    """Close every experiment that a kill left open: cut off ones are marked, judged ones decided, not judged again."""
    for one in session.journal.experiments():
        if one.state is ExperimentState.RECORDED:
            continue
        if one.state is ExperimentState.PROPOSED and one.candidate:
            session.store_source(one.number, one.candidate)
        finish(session, one.number, cut_off=True)
        outcome = next(after.status for after in session.journal.experiments() if after.number == one.number)
        again = "; the same candidate is judged again next" if outcome is RowStatus.INTERRUPTED else ""
        session.say(f"experiment {one.number} was left {one.state} by the run before: now {outcome}{again}")


def interrupt(session: Session) -> None:
    """Mark the experiment that a clean stop cut off; a judged one keeps its verdict and is decided on resume."""
    for one in session.journal.experiments()[-1:]:
        if one.state is ExperimentState.PROPOSED:
            finish(session, one.number, cut_off=True)


def next_proposal(session: Session) -> Candidate | InvalidReply | None:
    """What to judge next: the candidate that was cut off, else the proposer's idea for the best target."""
    interrupted = session.interrupted()
    if interrupted:
        return interrupted.candidate
    while (target := choose_target(session)) is not None:
        proposal = session.proposer.propose(session.brief(target))
        if not isinstance(proposal, NothingLeft):
            return proposal
        session.parked.add(target.id)
        session.say(f"{target.id} is parked: {proposal.reason}")
    return None


def choose_target(session: Session) -> Target | None:
    """The ranking's choice, or that of a proposer with an order of its own (replay)."""
    experiments = session.experiments()
    if isinstance(session.proposer, Ordered):
        playable = [target for target in session.targets if target.id not in session.parked]
        return session.proposer.next_target(playable, experiments)
    parked, seconds = frozenset(session.parked), session.journal.judge_seconds()
    rested = ranking.next_target(session.targets, experiments, parked | ranking.resting(experiments), seconds)
    return rested or ranking.next_target(session.targets, experiments, parked, seconds)


def _exhausted(session: Session) -> Outcome:
    experiments = session.journal.experiments()
    if experiments and experiments[-1].status is RowStatus.ENVIRONMENT:
        raise MachineError(f"No target is left that this machine can judge: {_words_of(experiments[-1])}")
    if experiments:
        return Outcome(Ending.EXHAUSTED, "every target is at its bound, parked or out of ideas")
    return Outcome(Ending.NOTHING, "the profile shows no target that any kernel could improve")


def park_unwell(session: Session, target: str) -> None:
    """Environment failures of one target park it; a streak of them over several targets is the machine's: stop.

    A machine too busy to measure on is given time between tries, and more of them.
    """
    experiments = session.journal.experiments()
    streak = ranking.environment_streak(experiments)
    if not streak:
        return
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

"""When the machine failed, not the candidate: targets parked, a busy machine given time, a sick one stopped."""

import time
from collections.abc import Sequence

from agent import ranking
from agent.errors import MachineError
from agent.records import Experiment, RowStatus
from agent.session import Session

ENVIRONMENT_STREAK = 3
UNRELIABLE_STREAK = 6  # a busy machine may calm down: it gets more chances, and time
TARGET_ENVIRONMENT_STREAK = 2
UNRELIABLE_WAIT_S = 10.0


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
        session.say(f"{target} is parked: {words_of(mine[-1])}")
    several = busy or len({one.target for one in streak}) > 1
    if several and len(streak) >= (UNRELIABLE_STREAK if busy else ENVIRONMENT_STREAK):
        reason = words_of(streak[-1])
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


def words_of(one: Experiment) -> str:
    """Why an experiment failed, in its judge's words or ours."""
    return one.verdict.detail if one.verdict else one.detail

"""What happens between two experiments: the user's wishes are heeded, changed settings are read."""

import time
from dataclasses import replace

from agent.executors.bench import Bench
from agent.live_settings import LiveSettings
from agent.records import Candidate
from agent.session import Session
from agent.steering import steer, steering, waiting

POLL_S = 0.2


class Between:
    """The session between two experiments."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = LiveSettings(session)
        steer(session.places, lambda wish: replace(wish, paused=False, stopping=False))  # a start overrules both
        self._settings.look()

    def look(self) -> None:
        """Take over what the user has changed."""
        self._settings.look()

    @property
    def paused(self) -> bool:
        """Whether the user wants the session to rest."""
        return steering(self._session.places).paused

    def rest(self, bench: Bench) -> None:
        """Wait until the user says go on or stop; whoever pauses wants the device for something else."""
        session = self._session
        bench.rest()
        session.say(f"paused: go on with `overnight resume {session.places.name}`")
        while self.paused and session.stop_reason() is None:
            time.sleep(POLL_S)
            session.journal.rest(POLL_S)
        if not self.paused:
            session.say("going on after the pause")


def next_handed_in(session: Session) -> Candidate | None:
    """The next kernel that the user has handed in and that the journal does not have yet."""
    candidates = waiting(session.places)
    if not candidates:
        return None
    known = {one.candidate.tactic for one in session.journal.experiments() if one.candidate}
    targets = {target.id for target in session.targets}
    for candidate in candidates:
        if candidate.tactic not in known and candidate.target in targets:
            return candidate
    return None


def unpinned(session: Session) -> bool:
    """Release a pinned target that nothing is left for, so that the others are worked on; whether there was one."""
    pinned = steering(session.places).pinned
    if pinned is None or any(one.target == pinned and one.status is None for one in session.experiments()):
        return False  # what is being judged may give new ideas
    steer(session.places, lambda wish: replace(wish, pinned=None))
    session.say(f"{pinned} was pinned and has nothing left: the other targets are worked on")
    return True

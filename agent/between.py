"""What happens between two experiments: the user's wishes are heeded, changed settings are read."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from agent import disk
from agent.errors import MachineError
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

    def look(self, bench: Bench) -> None:
        """Take over what the user has changed; see that disk and devices are fit. Raises MachineError to stop."""
        self._settings.look()
        if not bench.busy:
            self._find_space(bench)
        self._session.watch.look(idle=not bench.busy)

    def _find_space(self, bench: Bench) -> None:
        """Prune our own caches when a disk is nearly full, and stop before it is."""
        session = self._session
        folders = (session.places.folder, session.places.root, Path(tempfile.gettempdir()))
        if disk.short_of_space(folders) is None:
            return
        bench.rest()  # a judge may have the caches open
        session.say(f"the disk is nearly full: {disk.prune() / 1e6:.0f} MB of our own compiler caches were deleted")
        short = disk.short_of_space(folders)
        if short:
            session.journal.event(short)
            raise MachineError(f"{short}: stopped before it is full; free some space")

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

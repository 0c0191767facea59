"""The workspace's sessions as last read; what has not changed is not read again, and nothing is ever written.

A revision is a hash of the sizes and times of a session's files: cheap enough to be asked for twice a second.
"""

import hashlib
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from agent.errors import InputError, MachineError, OvernightError
from agent.journal import Journal
from agent.lock import running
from agent.morning.night import Night, Trial, read_night
from agent.places import SessionPlaces, sessions
from agent.records import Experiment, ExperimentState


@dataclass(frozen=True)
class Spine:
    """One session on the shelf: its night, or why that cannot be read."""

    name: str
    revision: str
    night: Night | None
    problem: str = ""


class Shelf:
    """All sessions of a workspace, for any number of readers at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._spines: dict[str, Spine] = {}
        self._inodes: dict[str, int] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The sessions, the latest first."""
        return sessions(self.root)[::-1]

    def revisions(self) -> dict[str, str]:
        """What each session is like now, in a few characters."""
        return {name: revision(SessionPlaces(self.root, name)) for name in self.names()}

    def spines(self) -> list[Spine]:
        """All sessions, the latest first."""
        return [self.spine(name) for name in self.names()]

    def nights(self) -> list[Night]:
        """Those that can be read."""
        return [spine.night for spine in self.spines() if spine.night]

    def spine(self, name: str) -> Spine:
        """One session; raises InputError for a name that is none, whatever it looks like."""
        if name not in self.names():
            raise InputError(f"There is no session {name} here.")
        places = SessionPlaces(self.root, name)
        with self._lock:
            before, now = self._spines.get(name), revision(places)
            if before is None or before.revision != now:
                self._spines[name] = self._read(places, now, before)
            return self._spines[name]

    def night(self, name: str) -> Night:
        """One session's night; raises InputError for an unknown name, MachineError for one that cannot be read."""
        spine = self.spine(name)
        if spine.night is None:
            raise MachineError(spine.problem)
        return spine.night

    def trial(self, name: str, number: int) -> Trial:
        """One experiment, with prompt and reply."""
        found = self.night(name).trial(number)
        if found is None:
            raise InputError(f"Session {name} has no experiment {number}.")
        path = SessionPlaces(self.root, name).journal
        with closing(Journal(path, read_only=True)) as journal, journal.frozen():
            whole = journal.experiment(number)
        return replace(found, experiment=whole) if whole else found

    def _read(self, places: SessionPlaces, now: str, before: Spine | None) -> Spine:
        try:
            inode = places.journal.stat().st_ino
            same = before is not None and before.night is not None and self._inodes.get(places.name) == inode
            known = _recorded(before.night) if same and before and before.night else []
            self._inodes[places.name] = inode
            return Spine(places.name, now, read_night(places, known=known, with_talk=False))
        except (OvernightError, OSError, ValueError) as error:
            return Spine(places.name, now, None, " ".join(str(error).split())[:500])


def _recorded(night: Night) -> list[Experiment]:
    experiments = (trial.experiment for trial in night.trials)
    return list(takewhile(lambda one: one.state is ExperimentState.RECORDED, experiments))


def revision(places: SessionPlaces) -> str:
    """Changes whenever the session does: its files by size and time, and whether it runs."""
    journal = places.journal
    watched = (journal, journal.with_name(journal.name + "-wal"), places.profile, places.verified, places.timeline)
    seen = [_stamp(path) for path in watched]
    holder = running(places.lock)
    return hashlib.sha256(repr((seen, holder)).encode()).hexdigest()[:16]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError:
        return (0, 0, 0)
    if not state.st_size:  # SQLite's empty side file comes and goes with readers
        return (0, 0, 0)
    return (state.st_ino, state.st_size, state.st_mtime_ns)

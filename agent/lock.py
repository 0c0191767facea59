"""One supervisor per session: a lock file with pid and start time, freed by the kernel when its holder dies."""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from agent.errors import InputError


@dataclass(frozen=True)
class Holder:
    """Who runs a session: a pid means nothing without its start time (seconds since the epoch)."""

    pid: int
    started: float

    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


class SessionLock:
    """Held from `take` to `release`, or to the process's death."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def take(self) -> str | None:
        """Take it; raises InputError while another supervisor lives. Returns what was found when it was stale."""
        before = holder(self.path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise self._busy(holder(self.path)) from None
        if before and before.pid != os.getpid() and before.alive():
            self._close()
            raise self._busy(before)
        self._write()
        return f"the supervisor before (pid {before.pid}) ended without saying so" if before else None

    def release(self) -> None:
        """Empty the file and free it."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            self._close()

    def _write(self) -> None:
        mine = {"pid": os.getpid(), "started": psutil.Process().create_time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(mine).encode(), 0)
        os.fsync(self._descriptor)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _busy(self, who: Holder | None) -> InputError:
        pid = f" (pid {who.pid})" if who else ""
        name = self.path.parent.name
        return InputError(
            f"Session {name} is already running{pid}: see `overnight status {name}`, or end it with"
            f" `overnight stop {name}`."
        )


def holder(path: Path) -> Holder | None:
    """Who the lock file names; None when it is absent, empty or not ours."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Holder(int(data["pid"]), float(data["started"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def running(path: Path) -> Holder | None:
    """The living supervisor, None when there is none."""
    who = holder(path)
    return who if who and who.alive() else None

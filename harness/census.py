"""The processes below a process and the CPU time they took, read from /proc (psutil looks at the whole machine)."""

import os
from contextlib import suppress
from pathlib import Path


def tree_of(root: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        for task in _listed(Path(f"/proc/{waiting.pop()}/task")):
            fresh = [int(word) for word in _text(task / "children").split()]
            found += fresh
            waiting += fresh
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU time, user and system, of these processes so far; in steps of the clock tick (10 ms)."""
    ticks = 0
    for pid in pids:
        fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):  # the process has ended
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):  # the thread has ended
        return path.read_text()
    return ""

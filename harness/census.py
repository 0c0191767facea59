"""The processes below a process and how busy they were, read from /proc (psutil looks at the whole machine)."""

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


def busy_seconds(pids: list[int]) -> float:
    """How long the threads of these processes have run or waited for a free core so far: load beside them is no alibi.

    Falls back to their CPU time, in steps of 10 ms, where the kernel keeps no scheduling statistics.
    """
    tasks = [task for pid in pids for task in _listed(Path(f"/proc/{pid}/task"))]
    found = [_text(task / "schedstat").split() for task in tasks]
    if any(found):
        return sum(int(words[0]) + int(words[1]) for words in found if len(words) > 1) / 1e9
    return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):  # the process has ended
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):  # the thread has ended
        return path.read_text()
    return ""

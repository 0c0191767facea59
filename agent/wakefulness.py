"""Keeps the machine from sleeping while a session runs, where systemd-logind offers it.

The inhibitor is a child that waits at a pipe of ours: it ends with us, however we end.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

SETTLE_S = 0.3
COMMAND = ("systemd-inhibit", "--what=sleep:idle", "--who=overnight", "--mode=block")


@contextmanager
def awake(name: str) -> Iterator[bool]:
    """Inhibit sleep inside; yields whether it is inhibited."""
    if shutil.which(COMMAND[0]) is None:
        yield False
        return
    child = subprocess.Popen(
        [*COMMAND, f"--why=session {name} is running", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield _still_runs(child)
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=5)


def _still_runs(child: "subprocess.Popen[bytes]") -> bool:
    """It ends at once where there is no logind to ask."""
    try:
        child.wait(timeout=SETTLE_S)
    except subprocess.TimeoutExpired:
        return True
    return False

"""An exclusive lease of a device on this host: a lock file each, freed by the kernel when its holder dies.

Keeps two sessions from measuring on one GPU at the same moment. Does not protect against programs that are not ours.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.errors import StopRequestedError

POLL_S = 0.05


@contextmanager
def leased(names: Sequence[str], stop: Callable[[], bool]) -> Iterator[None]:
    """Hold all of `names`, taken in sorted order so that two holders never wait for each other.

    Raises StopRequestedError when `stop` says so while another session holds one.
    """
    with ExitStack() as held:
        for name in sorted(names):
            descriptor = os.open(_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, descriptor)
            while not _taken(descriptor):
                if stop():
                    raise StopRequestedError
                time.sleep(POLL_S)
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"overnight-leases-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder

"""Takes compiled code out of an untrusted worker's scratch folder, so that the next worker need not compile it again.

The folder is hostile: names, links, sizes and file kinds are the candidate's. Nothing is executed or parsed here, and
what is taken goes back to workers of the same candidate alone.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FOLDERS = ("tmp", "triton", "inductor", "extensions")  # sandbox.CACHES without the home folder
MOST_BYTES = 256 << 20
MOST_FILES = 4000
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_below(root: str, parts: Sequence[str]) -> int | None:
    """A descriptor of the folder `parts` below `root` (trusted), through no link; None when it is not there."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    for part in parts:
        try:
            below = os.open(part, FOLDER_FLAGS, dir_fd=folder)
        except OSError:
            below = None
        os.close(folder)
        if below is None:
            return None
        folder = below
    return folder


def harvest(scratch: int, into: Path) -> None:
    """Copy the compilers' folders below the open folder `scratch`, which is closed; stops at the size limits."""
    left, files = MOST_BYTES, MOST_FILES
    try:
        for name in FOLDERS:
            with suppress(OSError):
                below = os.open(name, FOLDER_FLAGS, dir_fd=scratch)
                try:
                    left, files = _copy_tree(below, into / name, left, files)
                finally:
                    os.close(below)
    finally:
        os.close(scratch)


def _copy_tree(top: int, into: Path, left: int, files: int) -> tuple[int, int]:
    for path, _folders, names, here in os.fwalk(".", dir_fd=top, follow_symlinks=False):
        target = into / path
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            if files <= 0 or left <= 0:
                return 0, 0
            with suppress(OSError):
                left -= _copy_file(here, name, target / name, left)
                files -= 1
    return left, files


def _copy_file(folder: int, name: str, target: Path, limit: int) -> int:
    """Bytes copied; a link, a pipe, a device and a file beyond the limit are left."""
    source = os.open(name, FILE_FLAGS, dir_fd=folder)
    with os.fdopen(source, "rb") as reader:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return 0
        content = reader.read(limit)
    target.write_bytes(content)
    target.chmod(0o700 if found.st_mode & 0o100 else 0o600)
    return len(content)

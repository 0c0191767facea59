"""The disks that a session writes to: how much is free, our own caches to prune, a stop before one is full."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

RESERVE_BYTES = 1 << 30
RESERVE_SHARE = 0.05  # of a small disk
EXPERIMENT_BYTES = 256 << 10  # what an experiment leaves: sources, verdict, log, journal


def reserve_bytes(total: int) -> int:
    """What stays free of a disk of that size."""
    return min(RESERVE_BYTES, int(total * RESERVE_SHARE))


def short_of_space(folders: Iterable[Path]) -> str | None:
    """Which of the folders' disks has less free than its reserve, in words; None when there is room."""
    for folder in folders:
        usage = shutil.disk_usage(folder)
        if usage.free < reserve_bytes(usage.total):
            return f"only {usage.free / 1e6:.0f} MB are free on the disk of {folder}"
    return None


def free_bytes(folder: Path) -> int:
    """What is free on a folder's disk."""
    return shutil.disk_usage(folder).free


def compiled_cache() -> Path:
    """Where judges keep compiled references and kept kernels; made again when it is missing."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "overnight" / "compiled"


def prune() -> int:
    """Delete our own compiler caches (no judge may be running); returns how many bytes they were."""
    folder = compiled_cache()
    size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    shutil.rmtree(folder, ignore_errors=True)
    return size

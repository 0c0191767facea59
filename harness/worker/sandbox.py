"""The layers between a worker and the machine, each tried and reported: namespaces, Landlock, seccomp, limits."""

import ctypes
import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_NAME = 15
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


class Layer(NamedTuple):
    """One layer: whether it is active and, when it is not, why."""

    name: str
    active: bool
    reason: str = ""


def switched_off() -> list[Layer]:
    """The report of a worker that runs without a sandbox on purpose."""
    return [Layer("sandbox", active=False, reason="switched off")]


def become_subreaper() -> None:
    """Orphaned descendants come to this process instead of the machine's init."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def rename(name: str) -> None:
    """Show a process under its own name."""
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def hide_memory() -> None:
    """No process of the same user may read or trace this one."""
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def show_memory() -> None:
    """Undo `hide_memory` in a child (profilers and CUDA read their own /proc/self)."""
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


@dataclass(frozen=True)
class Place:
    """Where a worker may write: its scratch folder, and for a trusted one a cache that lasts."""

    scratch: str
    cache: str | None

    @classmethod
    def of(cls, request: dict[str, Any]) -> "Place":
        """Read it from a fork request."""
        return cls(request["scratch"], request["cache"])

    def make(self) -> None:
        """Create the folders below the scratch folder."""
        for name in ("tmp", "home", "triton", "inductor", "extensions"):
            Path(self.scratch, name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def enter(self, request: dict[str, Any]) -> None:
        """Point every cache, temporary file and home at the scratch folder."""
        os.chdir(self.scratch)
        os.umask(0o077)
        caches = self.cache or self.scratch
        os.environ.update(
            HOME=f"{self.scratch}/home",
            TMPDIR=f"{self.scratch}/tmp",
            TRITON_CACHE_DIR=f"{caches}/triton",
            TRITON_HOME=f"{self.scratch}/home",
            TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor",
            TORCH_EXTENSIONS_DIR=f"{self.scratch}/extensions",
            CUDA_CACHE_PATH=f"{self.scratch}/nv",
            XDG_CACHE_HOME=f"{self.scratch}/home/.cache",
            USER="overnight",
            LOGNAME="overnight",
            **request["environment"],
        )
        tempfile.tempdir = None


def enter_namespaces() -> list[Layer]:
    return []


def private_mounts(place: Place, layers: list[Layer]) -> list[Layer]:
    return []


def confine(place: Place, request: dict[str, Any]) -> list[Layer]:
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = request["limits"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], limits["file_bytes"]))
    return [Layer("no_new_privs", active=True), Layer("rlimits", active=True)]

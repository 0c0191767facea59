"""The judge's workshop: a warm parent, and untrusted workers forked from it that are killed with all they started.

A worker answers in bounded JSON frames; its outputs are raw bytes in the arena. Nothing it says is believed further
than its own report goes: shapes are compared with what was asked for, times are the judge's own. What the sandbox
does not protect against: a kernel exploit, and reading what the allowed system folders hold.
"""

import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.answers import (
    CallReport,
    Census,
    Execution,
    KernelRaised,
    Limits,
    OutputReport,
    Prepared,
    PreparedCall,
    Sample,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
)
from harness.arena import Arena
from harness.errors import MachineError
from harness.worker import frames
from harness.worker.sandbox import SYSTEM_FOLDERS, readable_folders
from harness.worker_process import KILL_GRACE_S, Worker

__all__ = [
    "CallReport",
    "Census",
    "Execution",
    "KernelRaised",
    "Limits",
    "OutputReport",
    "Prepared",
    "PreparedCall",
    "Sample",
    "Worker",
    "WorkerDied",
    "WorkerOutOfMemory",
    "WorkerTimeout",
    "Workshop",
]
WORKER_FOLDER = Path(__file__).resolve().parent / "worker"
START_TIMEOUT_S = 120.0
PASSED_ENVIRONMENT = (
    "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CC", "CXX",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ROCM_HOME", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "TRITON_INTERPRET", "TRITON_PTXAS_PATH", "LC_ALL", "TZ",
)  # fmt: skip
WARM_ENVIRONMENT = {
    # glibc's heap trimming makes one eager op take 0.2 or 2.7 ms (facts.md, "glibc malloc trap")
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_MODULE_LOADING": "LAZY",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a look for a GPU in the warm parent must not initialise CUDA there
}
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "torch.utils.cpp_extension")


class Workshop:
    """Owns the warm parent of one device; workers are opened from it one after another or side by side.

    `without` names layers of the sandbox to leave out, to find the one that a machine cannot bear.
    """

    def __init__(
        self,
        device: str,
        limits: Limits | None = None,
        *,
        sandbox: bool = True,
        without: Sequence[str] = (),
        threads: int | None = None,
    ) -> None:
        self.device = device
        self.limits = limits or Limits()
        self._sandbox, self._without = sandbox, tuple(without)
        self._threads = threads
        self._folder = Path(tempfile.mkdtemp(prefix="overnight-"))
        self._lock = threading.Lock()
        self._preloaded: set[str] = set()
        self._count = 0
        self._warm: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._layers: tuple[str, ...] | None = None
        self._spare: Worker | None = None
        self._readable = readable_folders()
        self._hidden = _hidden_folders()
        self._start()

    @property
    def layers(self) -> tuple[str, ...]:
        """The sandbox as its workers report it before any foreign code: `name`, or `name: missing (reason)`."""
        if self._layers is None:
            with self._fork(Execution.PLAIN, cache=None) as worker:
                self._layers = worker.layers
        return self._layers

    def open(
        self,
        source: str,
        arena: Arena,
        *,
        entry: str = "kernel_fn",
        execution: Execution = Execution.PLAIN,
        trusted: bool = False,
        seed: Path | None = None,
    ) -> "Worker":
        """Fork a worker and map the arena into it; nothing of `source` is imported before `Worker.load`.

        `seed` holds what `Worker.harvest` took from an earlier worker of the same source: it need not compile again.
        A trusted worker (eager, compiled, incumbent) is the same but its compiler caches last. Only a reference of
        ours may be opened trusted with COMPILE.
        Raises MachineError when no worker can be started.
        """
        worker = None if trusted or seed or execution is Execution.COMPILE else self._take_spare()
        if worker is None:
            worker = self._fork(execution, _lasting_cache(source, execution) if trusted else None, seed)
        try:
            worker.attach(arena)
        except BaseException:
            worker.close()
            raise
        worker.choose(source, entry, execution)
        return worker

    def prepare_next(self) -> None:
        """Fork the next candidate's worker ahead, its CUDA context included. Never call this in a timed section."""
        if self._spare is None:
            self._spare = self._fork(Execution.PLAIN, cache=None)
            self._spare.awaken()

    def _take_spare(self) -> "Worker | None":
        spare, self._spare = self._spare, None
        if spare is not None and not spare.alive():
            spare.close()
            return None
        return spare

    def close(self) -> None:
        """End the spare worker and the warm parent and remove the scratch folders."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._warm is not None:
            try:
                self._warm.wait(KILL_GRACE_S)
            except subprocess.TimeoutExpired:
                self._warm.kill()
                self._warm.wait()
            self._warm = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, (self._folder / "warm.log").open("wb") as log:
            self._warm = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(WORKER_FOLDER / "warm.py"),
                    str(theirs.fileno()),
                    str(self._folder),
                    *_site_folders(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd=self._folder,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = ours
        try:
            hello = frames.receive(ours, time.monotonic() + START_TIMEOUT_S)
        except (TimeoutError, OSError, frames.BadFrame) as error:
            raise MachineError(f"the warm parent did not start: {error!r}; {self._warm_log()}") from error
        if hello is None:
            raise MachineError(f"the warm parent ended while starting: {self._warm_log()}")
        self._preloaded.clear()

    def _warm_log(self) -> str:
        with suppress(OSError):
            return (self._folder / "warm.log").read_text(errors="replace")[-2000:]
        return "(no log)"

    def seed_folder(self) -> Path:
        """A new folder for what one candidate compiles; whoever asks for it removes it."""
        return Path(tempfile.mkdtemp(prefix="seed-", dir=self._folder))

    def _fork(self, execution: Execution, cache: str | None, seed: Path | None = None) -> "Worker":
        with self._lock:
            for attempt in range(2):
                if self._channel is None or self._warm is None or self._warm.poll() is not None:
                    if self._channel is not None:
                        self._channel.close()
                    self._start()
                try:
                    return self._fork_once(execution, cache, seed)
                except BrokenPipeError as error:
                    if attempt:
                        raise MachineError(f"the warm parent keeps dying: {self._warm_log()}") from error
        raise AssertionError("unreachable")

    def _fork_once(self, execution: Execution, cache: str | None, seed: Path | None) -> "Worker":
        assert self._channel is not None
        self._count += 1
        scratch = self._folder / f"{self._count}-{secrets.token_hex(4)}"
        scratch.mkdir(mode=0o700)
        preload = COMPILER_MODULES if execution is Execution.COMPILE else ()
        request = {
            "device": self.device,
            "scratch": str(scratch),
            "cache": cache,
            "seed": str(seed) if seed else None,
            "threads": self._threads,
            "sandbox": self._sandbox,
            "without": self._without,
            "limits": asdict(self.limits),
            "environment": {},
            "readable": self._readable,
            "hidden": self._hidden,
            "preload": [name for name in preload if name not in self._preloaded],
        }
        self._preloaded.update(preload)
        channel, their_channel = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        log = os.memfd_create("overnight-log")
        with their_channel, their_lifeline:
            frames.send(self._channel, request, [their_channel.fileno(), their_lifeline.fileno(), log])
        return Worker(channel, lifeline, log, scratch, self.limits.start_timeout_s)


def _hidden_folders() -> tuple[str, ...]:
    """Our own code and the current folder, should they lie below something that a worker may read."""
    ours = Path(__file__).resolve().parent
    folders = [ours.parent] if (ours.parent / ".git").exists() else [ours, ours.parent / "agent"]
    folders.append(Path.cwd().resolve())
    system = [Path(folder) for folder in SYSTEM_FOLDERS]
    return tuple(str(path) for path in folders if not any(folder.is_relative_to(path) for folder in system))


def _lasting_cache(source: str, execution: Execution) -> str:
    """A compiler cache that lasts: one for all compiled references, which are ours, and one for each kept kernel.

    So a kept kernel, which was a candidate once, cannot plant code in the cache of the baseline it is measured against.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "references" if execution is Execution.COMPILE else hashlib.sha256(source.encode()).hexdigest()[:24]
    folder = base / "overnight" / "compiled" / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    return {"LANG": "C.UTF-8", **kept, **WARM_ENVIRONMENT}


def _site_folders() -> list[str]:
    """Folders of torch and triton that an isolated interpreter might not look into (user site, PYTHONPATH)."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for name in ("torch", "triton", "numpy"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(folders))

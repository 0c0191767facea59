"""The judge's workshop: a warm parent, and untrusted workers forked from it that are killed with all they started.

A worker answers in bounded JSON frames; its outputs are raw bytes in the arena. Nothing it says is believed further
than its own report goes: shapes are compared with what was asked for, times are the judge's own. What the sandbox
does not protect against: a kernel exploit, and reading what the allowed system folders hold.
"""

import hashlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from harness.arena import Arena, Slot
from harness.errors import MachineError
from harness.records import Scalar
from harness.worker import frames
from harness.worker.sandbox import SYSTEM_FOLDERS, readable_folders

WORKER_FOLDER = Path(__file__).resolve().parent / "worker"
START_TIMEOUT_S = 120.0
KILL_GRACE_S = 10.0
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


class Execution(StrEnum):
    """How a kernel is called: directly, through a dispatcher op as when spliced, or as its compiled artefact."""

    PLAIN = "plain"
    OP = "op"
    COMPILE = "compile"


@dataclass(frozen=True)
class Limits:
    """What one worker may use. Beyond `log_bytes` output is thrown away, beyond `output_bytes` the worker is killed."""

    memory_bytes: int = 16 << 30
    processes: int = 256
    file_bytes: int = 2 << 30
    scratch_bytes: int = 4 << 30
    log_bytes: int = 1 << 18
    output_bytes: int = 1 << 27
    start_timeout_s: float = 60.0


@dataclass(frozen=True)
class OutputReport:
    """What a worker says one output was; `copied` when its elements lie in the slot, contiguously, in its own dtype."""

    type_name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage_nbytes: int
    aliases_input: bool
    copied: bool
    device: str


@dataclass(frozen=True)
class CallReport:
    """One call's outputs; `structure` is the returned object's type name, `count` its number of leaves."""

    outputs: tuple[OutputReport, ...]
    structure: str
    count: int
    peak_memory_mb: float | None


@dataclass(frozen=True)
class PreparedCall:
    """A call of the timed runs; `positional` constants follow the inputs, `results` is the number of outputs."""

    inputs: tuple[Slot, ...]
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    positional: tuple[Scalar, ...] = ()
    results: int = 1


@dataclass(frozen=True)
class Prepared:
    """How the timed runs will go: replayed as one CUDA graph, or launched one by one (and why)."""

    graphed: bool
    reason: str


@dataclass(frozen=True)
class Sample:
    """One timed run: the judge's clock around the round trip, and the worker's claim of device time."""

    seconds: float
    device_seconds: float | None


@dataclass(frozen=True)
class Census:
    """Processes of a worker's tree (its guard left out) and their threads."""

    processes: int
    threads: int


class KernelRaised(Exception):  # noqa: N818 - names read as what happened
    """The kernel raised, at import or in a call."""

    def __init__(self, type_name: str, message: str, trace: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name, self.message, self.trace = type_name, message, trace


class WorkerTimeout(Exception):  # noqa: N818 - names read as what happened
    """The worker did not answer in time; it has been killed."""


class WorkerDied(Exception):  # noqa: N818 - names read as what happened
    """The worker ended without an answer: `exit_code` or `signal` says how, `reason` which limit it broke."""

    def __init__(self, message: str, exit_code: int | None = None, signal: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.signal, self.reason = exit_code, signal, reason


class WorkerOutOfMemory(Exception):  # noqa: N818 - names read as what happened
    """The worker ran out of memory, or was killed for using too much."""


class Workshop:
    """Owns the warm parent of one device; workers are opened from it one after another or side by side."""

    def __init__(
        self, device: str, limits: Limits | None = None, *, sandbox: bool = True, threads: int | None = None
    ) -> None:
        self.device = device
        self.limits = limits or Limits()
        self._sandbox = sandbox
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
    ) -> "Worker":
        """Fork a worker and map the arena into it; nothing of `source` is imported before `Worker.load`.

        A trusted worker (eager, compiled, incumbent) is the same but its compiler caches last. Only a reference of
        ours may be opened trusted with COMPILE.
        Raises MachineError when no worker can be started.
        """
        worker = None if trusted or execution is Execution.COMPILE else self._take_spare()
        if worker is None:
            worker = self._fork(execution, _lasting_cache(source, execution) if trusted else None)
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

    def _fork(self, execution: Execution, cache: str | None) -> "Worker":
        with self._lock:
            for attempt in range(2):
                if self._channel is None or self._warm is None or self._warm.poll() is not None:
                    if self._channel is not None:
                        self._channel.close()
                    self._start()
                try:
                    return self._fork_once(execution, cache)
                except BrokenPipeError as error:
                    if attempt:
                        raise MachineError(f"the warm parent keeps dying: {self._warm_log()}") from error
        raise AssertionError("unreachable")

    def _fork_once(self, execution: Execution, cache: str | None) -> "Worker":
        assert self._channel is not None
        self._count += 1
        scratch = self._folder / f"{self._count}-{secrets.token_hex(4)}"
        scratch.mkdir(mode=0o700)
        # On a GPU these imports touch CUDA, and a process that has touched CUDA cannot fork workers that use it.
        preload = COMPILER_MODULES if execution is Execution.COMPILE and self.device == "cpu" else ()
        request = {
            "device": self.device,
            "scratch": str(scratch),
            "cache": cache,
            "threads": self._threads,
            "sandbox": self._sandbox,
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


class Worker:
    """One forked worker; leaving the context kills its whole process tree and removes its scratch folder."""

    def __init__(
        self, channel: socket.socket, lifeline: socket.socket, log: int, scratch: Path, start_timeout_s: float
    ) -> None:
        self._channel, self._lifeline, self._log = channel, lifeline, log
        self._scratch = scratch
        self._start_timeout_s = start_timeout_s
        self._ended: dict[str, Any] | None = None
        self._guard = 0
        self._closed = False
        self._source: dict[str, str] = {}
        self._expected = ""
        self.arena: Arena | None = None
        self._final_log = ""
        self.peak_memory_mb: float | None = None
        try:
            self._guard = int(self._hear(time.monotonic() + start_timeout_s).get("guard", 0))
            if not self._guard:
                raise MachineError("no worker could be forked: out of processes or memory")
            hello = self._receive(start_timeout_s)
            self.layers = tuple(
                name if active else f"{name}: missing ({reason})" for name, active, reason in hello["layers"]
            )
        except (WorkerTimeout, WorkerDied) as error:
            self.close()
            raise MachineError(f"a worker did not start: {error}; {self.log[-1000:]}") from error
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        """What the worker printed, its middle left out when it is long."""
        if self._closed:
            return self._final_log
        return os.pread(self._log, 1 << 22, 0).decode(errors="replace")

    def awaken(self) -> None:
        """Make the device's context ahead of its use."""
        self._ask({"verb": "awaken"}, self._start_timeout_s)

    def attach(self, arena: Arena) -> None:
        """Map the arena into the worker; used by `Workshop.open`."""
        body, descriptors = arena.invitation()
        try:
            self._expected = ""
            frames.send(self._channel, {"verb": "attach", **body}, descriptors)
            self._receive(self._start_timeout_s)
        except (WorkerTimeout, WorkerDied, KernelRaised, OSError) as error:
            raise MachineError(f"a worker could not map the arena: {error}; {self.log[-1000:]}") from error
        self.arena = arena

    def choose(self, source: str, entry: str, execution: Execution) -> None:
        """Say what `load` will import; used by `Workshop.open`."""
        self._source = {"source": source, "entry": entry, "execution": execution.value}

    def alive(self) -> bool:
        """Whether the worker still runs, as far as its guard has said."""
        return not self._closed and not select.select([self._lifeline], [], [], 0)[0]

    def load(self, timeout_s: float) -> None:
        """Import the kernel file. Raises KernelRaised, WorkerTimeout, WorkerDied, WorkerOutOfMemory."""
        self._ask({"verb": "load", **self._source}, timeout_s)

    def prepack(self, weights: Sequence[Slot], timeout_s: float) -> float | None:
        """Have the file's `prepack` rearrange these weights; the seconds it took, None when it declares none.

        Later calls that name the same slots get the packed tensors instead: call it again when contents change.
        """
        begin = time.perf_counter()
        answer = self._ask({"verb": "prepack", "weights": [asdict(slot) for slot in weights]}, timeout_s)
        return time.perf_counter() - begin if answer.get("packed") is True else None

    def call(
        self,
        inputs: Sequence[Slot],
        constants: Mapping[str, Scalar],
        outputs: Sequence[Slot],
        timeout_s: float,
        *,
        positional: Sequence[Scalar] = (),
    ) -> CallReport:
        """Call the kernel once; its outputs' elements land contiguously in `outputs`, as far as they fit."""
        body = {
            "verb": "call",
            "inputs": [asdict(slot) for slot in inputs],
            "constants": dict(constants),
            "positional": list(positional),
            "outputs": [asdict(slot) for slot in outputs],
        }
        return self._call_report(self._ask(body, timeout_s))

    def prepare(self, calls: Sequence[PreparedCall], timeout_s: float) -> Prepared:
        """Make timed runs ready: every prepared call runs a few times; on a GPU all are captured in one graph."""
        answer = self._ask({"verb": "prepare", "calls": [asdict(call) for call in calls]}, timeout_s)
        return Prepared(answer.get("graphed") is True, _text(answer.get("reason")))

    def time(self, repeats: int, timeout_s: float, *, flush: bool = False) -> Sample:
        """Run all prepared calls `repeats` times; `flush` empties the GPU's L2 before each repeat."""
        body = {"verb": "time", "repeats": repeats, "flush": flush}
        self._settle()
        begin = time.perf_counter()
        answer = self._ask(body, timeout_s)
        seconds = time.perf_counter() - begin
        return Sample(seconds, _number(answer.get("device_seconds")))

    def collect(self, index: int, outputs: Sequence[Slot], timeout_s: float = 60.0) -> CallReport:
        """Copy what prepared call `index` returned in the last timed run into `outputs`."""
        slots = [asdict(slot) for slot in outputs]
        return self._call_report(self._ask({"verb": "collect", "index": index, "outputs": slots}, timeout_s))

    def census(self) -> Census:
        """Count the worker's processes and threads from outside."""
        processes = threads = 0
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._guard).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    threads += process.num_threads()
                    processes += 1
        return Census(processes, threads)

    def pause(self) -> None:
        """Stop every process of the worker: nothing of it runs until `resume`. Raises WorkerDied when it is gone."""
        self._order(b"p")

    def resume(self) -> None:
        """Let a paused worker go on."""
        self._order(b"r")

    def _order(self, word: bytes) -> None:
        try:
            self._lifeline.sendall(word)
            body = self._hear(time.monotonic() + KILL_GRACE_S)
        except OSError:
            body = {}
        if body.get("obeyed") != word.decode():
            self._ended = self._ended or body
            raise self._post_mortem()

    def close(self) -> None:
        """Kill the whole tree and wait until it is gone."""
        if self._closed:
            return
        with suppress(OSError):
            self._lifeline.sendall(b"end\n")
        with suppress(WorkerTimeout):
            self._await_end(KILL_GRACE_S)
        if self._guard and not self._ended:
            _kill(self._guard)
        _await_absence(self._guard)
        self._final_log = os.pread(self._log, 1 << 22, 0).decode(errors="replace")
        self._closed = True
        self._channel.close()
        self._lifeline.close()
        os.close(self._log)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._settle()
        self._expected = secrets.token_hex(8)  # an answer written ahead of its question cannot know it
        self._channel.settimeout(timeout_s)
        try:
            frames.send(self._channel, {**body, "id": self._expected})
        except TimeoutError:
            self.close()
            raise WorkerTimeout(f"the worker took no request within {timeout_s:g} s") from None
        except OSError:
            raise self._post_mortem() from None
        return self._receive(timeout_s)

    def _settle(self) -> None:
        if self.arena is not None:
            self.arena.settle()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = frames.receive(self._channel, time.monotonic() + timeout_s)
        except TimeoutError:
            self.close()
            raise WorkerTimeout(f"no answer within {timeout_s:g} s") from None
        except frames.BadFrame as error:
            self.close()
            raise WorkerDied(f"the worker wrote what is not an answer: {error}", reason="protocol") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._post_mortem()
        if answer.get("id", "") != self._expected:
            self.close()
            raise WorkerDied("the worker wrote an answer to what was not asked", reason="protocol")
        if "raised" in answer:
            raised, message = _text(answer["raised"]), _text(answer.get("message"))
            if answer.get("memory") is True:
                raise WorkerOutOfMemory(f"{raised}: {message}")
            raise KernelRaised(raised, message, _text(answer.get("trace")))
        return answer

    def _post_mortem(self) -> Exception:
        """Why the worker ended, from its guard."""
        with suppress(WorkerTimeout):
            self._await_end(KILL_GRACE_S)
        ended = self._ended or {}
        self.close()
        reason = str(ended.get("reason", ""))
        if reason == "memory":
            return WorkerOutOfMemory("the worker was killed for using more memory than it may")
        if reason in {"output", "processes"}:
            what = {"output": "printed more", "processes": "started more processes"}[reason]
            return WorkerDied(f"the worker {what} than it may and was killed", reason=reason)
        if reason != "ended":
            return WorkerDied("the worker vanished, most likely killed by the kernel for memory", reason="vanished")
        status = int(ended["ended"])
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return WorkerDied(f"the worker was killed by {signal.Signals(number).name}", signal=number, reason="signal")
        code = os.WEXITSTATUS(status)
        return WorkerDied(f"the worker exited with code {code} without an answer", exit_code=code, reason="exit")

    def _await_end(self, timeout_s: float) -> None:
        """Wait for the guard's last word, or for its end."""
        deadline = time.monotonic() + timeout_s
        while self._ended is None:
            body = self._hear(deadline)
            if "ended" in body or not body:
                self._ended = body

    def _hear(self, deadline: float) -> dict[str, Any]:
        """One line from the guard; empty when its end is closed."""
        line = bytearray()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._lifeline], [], [], left)[0]:
                raise WorkerTimeout("the worker's guard did not answer")
            try:
                byte = self._lifeline.recv(1)
            except ConnectionResetError:
                byte = b""
            if not byte:
                return {}
            line += byte
        body: dict[str, Any] = json.loads(line)
        return body

    def _call_report(self, answer: dict[str, Any]) -> CallReport:
        try:
            outputs = tuple(_output_report(entry) for entry in answer["outputs"])
            report = CallReport(
                outputs, _text(answer["structure"]), int(answer["count"]), _number(answer.get("peak_memory_mb"))
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.close()
            raise WorkerDied(f"the worker's answer has not the agreed form: {error!r}", reason="protocol") from None
        self.peak_memory_mb = report.peak_memory_mb
        return report


def _output_report(entry: Mapping[str, Any]) -> OutputReport:
    return OutputReport(
        type_name=_text(entry["type_name"]),
        dtype=_text(entry.get("dtype")),
        shape=tuple(int(size) for size in entry.get("shape", ())),
        stride=tuple(int(step) for step in entry.get("stride", ())),
        storage_offset=int(entry.get("storage_offset", 0)),
        storage_nbytes=int(entry.get("storage_nbytes", 0)),
        aliases_input=entry.get("aliases_input") is True,
        copied=entry.get("copied") is True,
        device=_text(entry.get("device")),
    )


def _text(value: object) -> str:
    return value[:20000] if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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


def _kill(guard: int) -> None:
    """The fallback when a guard does not answer: its tree; orphans of a dead one are the warm parent's to kill."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(guard)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _await_absence(guard: int) -> None:
    """A guard leaves after its last word; the processes below it are gone by then."""
    deadline = time.monotonic() + KILL_GRACE_S
    while guard and Path(f"/proc/{guard}").exists() and time.monotonic() < deadline:
        time.sleep(0.001)


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

"""What runs inside an untrusted worker: loads one kernel file, calls it on shared memory, answers in JSON frames.

Everything it answers is a claim: the judge reads output bytes itself, hashes inputs itself and owns the clock.
"""

import gc
import importlib.util
import io
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import audit, frames
from .compiled import compiled
from .integrity import Snapshot
from .shared_memory import SharedMemory, describe, slot_key, span

MAX_TEXT = 8000
WARM_UP_CALLS = 3
RELEASE_TRIES, RELEASE_STEP_S = 20, 1e-3
OUT_OF_MEMORY_SIGNS = ("can't allocate memory", "CUDA error: out of memory", "CUDACachingAllocator.cpp")
"""The last: PyTorch asks NVML how much is free before it says so, and the sandbox has no NVML."""

# Bound before any kernel file is imported; the judge's own clock is what finally counts.
_Event = torch.cuda.Event
_elapsed_ms: Callable[[Any, Any], float] = torch.cuda.Event.elapsed_time
_synchronize_device = torch.cuda.synchronize

Kernel = Callable[..., Any]


@dataclass
class Prepared:
    """One call made ready: its tensors, the memory that an output must not share, and what the last run returned."""

    tensors: list[torch.Tensor]
    storages: list[tuple[int, int]]
    run: Callable[[], Any]
    result: Any = None


class Worker:
    """The state of one worker between frames."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.scratch: str = request["scratch"]
        self.device = torch.device(request["device"])
        self.memory: SharedMemory | None = None
        self.kernel: Kernel | None = None
        self.execution = "plain"
        self.prepared: list[Prepared] = []
        self.graph: Any = None
        self.module: ModuleType | None = None
        self.before: Snapshot | None = None
        self.shared: dict[str, Any] | None = None
        self.source = ""
        names = ("awaken", "load", "prepack", "call", "prepare", "time", "collect")
        self.verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            name: getattr(self, name) for name in names
        }
        self._packed: dict[tuple[Any, ...], torch.Tensor] = {}
        self._bound: dict[Any, Kernel] = {}
        self._libraries: list[Any] = []

    def awaken(self, _body: dict[str, Any]) -> dict[str, Any]:
        """Make the CUDA context, on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            torch.empty(1, device=self.device)
        return {}

    def attach(self, body: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        """Map the arena; on a GPU this makes the CUDA context."""
        self.memory = SharedMemory(body, descriptors)
        return {}

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Write the source into the scratch folder and import it as a fresh module."""
        name = f"kernel_{os.getpid()}"
        self.source = body["source"]
        if body.get("audit"):
            audit.watch_symbols()
        path = Path(self.scratch, f"{name}.py")
        path.write_text(body["source"], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        self.before = Snapshot(__name__.rpartition(".")[0], self.verbs)
        spec.loader.exec_module(module)
        self.execution = body["execution"]
        entry = getattr(module, body["entry"], None)
        if not callable(entry):
            raise AttributeError(f"the file defines no function {body['entry']}")
        self.kernel, self.module = entry, module
        return {}

    def prepack(self, body: dict[str, Any]) -> dict[str, Any]:
        """Let the file rearrange these weights; later calls get its tensors where they name the same slots."""
        assert self.memory is not None
        function = getattr(self.module, "prepack", None)
        if function is None:
            return {"packed": False}
        if body.get("forget"):
            self._packed.clear()
        packed = function(*[self.memory.tensor(slot) for slot in body["weights"]])
        leaves = list(packed) if isinstance(packed, tuple | list) else [packed]
        if len(leaves) != len(body["weights"]) or not all(type(leaf) is torch.Tensor for leaf in leaves):
            raise TypeError(f"prepack must return one tensor for each of its {len(body['weights'])} weights")
        for key, leaf in zip(map(slot_key, body["weights"]), leaves, strict=True):
            self._keep_packed(key, leaf)
        self._synchronize()
        return {"packed": True}

    def _keep_packed(self, key: tuple[Any, ...], leaf: torch.Tensor) -> None:
        """In place where the same weights were packed before: a graph was recorded with that memory."""
        known = self._packed.get(key)
        if known is None:
            self._packed[key] = leaf
            return
        if (known.shape, known.stride(), known.dtype) != (leaf.shape, leaf.stride(), leaf.dtype):
            raise TypeError("prepack must return the same layout for the same weights")
        if known is not leaf:
            known.copy_(leaf)

    def call(self, body: dict[str, Any]) -> dict[str, Any]:
        """One call; its outputs copied into the slots that the judge named."""
        self.shared = None
        prepared = self._prepare(body, len(body["outputs"]))
        if body.get("audit"):
            with audit.traced(self.source, launches=body["launches"]) as library:
                prepared.result = prepared.run()
        else:
            library = set()
            prepared.result = prepared.run()
        self._synchronize()
        answer = {**self._deliver(prepared, body["outputs"]), "library": sorted(library)[:16]}
        watched = _storages_of(prepared.result)
        prepared.result = None
        return {**answer, "kept": _any_alive(watched)}

    def prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make the calls of the timed runs ready; on a GPU warm up and capture them all in one graph."""
        self.graph = None
        self.prepared = [self._prepare(call, call["results"]) for call in body["calls"]]
        for _ in range(WARM_UP_CALLS):
            self._run_all()
        self._synchronize()
        reason = ""
        if self._cuda():
            reason = self._capture()
        return {"graphed": self.graph is not None, "reason": reason}

    def time(self, body: dict[str, Any]) -> dict[str, Any]:
        """Run all prepared calls `repeats` times; on a GPU with events around each repeat."""
        self.shared = None
        if not self._cuda():
            for _ in range(body["repeats"]):
                self._run_all()
            return {"device_seconds": None, "addresses": [_addresses(prepared.result) for prepared in self.prepared]}
        pairs = []
        for _ in range(body["repeats"]):
            if body["flush"]:
                self._flush_cache()
            begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
            begin.record()
            if self.graph is not None:
                self.graph.replay()
            else:
                self._run_all()
                _synchronize_device()  # work on other streams counts too
            end.record()
            pairs.append((begin, end))
        _synchronize_device()
        return {"device_seconds": sum(_elapsed_ms(begin, end) for begin, end in pairs) / 1e3}

    def collect(self, body: dict[str, Any]) -> dict[str, Any]:
        """Copy what the last timed run of one prepared call returned."""
        return self._deliver(self.prepared[body["index"]], body["outputs"])

    def _run_all(self) -> None:
        for prepared in self.prepared:
            prepared.result = prepared.run()

    def _capture(self) -> str:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run_all()
        except Exception as error:
            # A kernel that synchronises or allocates by itself cannot be captured: it is timed launch by launch.
            _synchronize_device()
            self._run_all()
            return _clipped(f"{type(error).__name__}: {error}")
        self.graph = graph
        graph.replay()
        _synchronize_device()
        return ""

    def _flush_cache(self) -> None:
        if not hasattr(self, "_flusher"):
            size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flusher = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        self._flusher.zero_()

    def _prepare(self, body: dict[str, Any], results: int) -> Prepared:
        assert self.memory is not None
        inputs = [(self.memory.tensor(slot), self._packed.get(slot_key(slot))) for slot in body["inputs"]]
        tensors = [plain if packed is None else packed for plain, packed in inputs]
        storages = [span(tensor) for pair in inputs for tensor in pair if tensor is not None]
        function = self._bind(tensors, body["positional"], body["constants"], results)
        return Prepared(tensors, storages, lambda: function(*tensors))

    def _bind(
        self, tensors: list[torch.Tensor], positional: list[Any], constants: dict[str, Any], results: int
    ) -> Kernel:
        """The entry in the asked execution, constants bound, taking tensors alone."""
        kernel = self.kernel
        assert kernel is not None
        key: tuple[Any, ...] = (len(tensors), repr(positional), repr(constants), results)
        if self.execution == "compile":
            key += tuple((tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors)
        if key in self._bound:
            return self._bound[key]

        bound: Kernel = kernel
        if positional or constants:

            def bound(*args: torch.Tensor) -> Any:
                return kernel(*args, *positional, **constants)

        if self.execution == "op":
            bound = self._as_op(bound, len(tensors), results)
        elif self.execution == "compile":
            bound = compiled(bound, tensors)
        self._bound[key] = bound
        return bound

    def _as_op(self, function: Kernel, arguments: int, results: int) -> Kernel:
        """A real operator of the dispatcher, as the spliced model calls it (4-6 µs)."""
        library = torch.library.Library(f"overnight_{len(self._libraries)}_{os.getpid()}", "DEF")
        self._libraries.append(library)
        taken = ", ".join(f"Tensor a{index}" for index in range(arguments))
        given = "Tensor" if results == 1 else "(" + ", ".join(["Tensor"] * results) + ")"
        library.define(f"kernel({taken}) -> {given}")
        library.impl("kernel", function, "CUDA" if self._cuda() else "CPU")
        operator: Kernel = getattr(torch.ops, library.ns).kernel.default
        return operator

    def _cuda(self) -> bool:
        return self.memory is not None and self.memory.device.type == "cuda"

    def _synchronize(self) -> None:
        if self._cuda():
            _synchronize_device()

    def _deliver(self, prepared: Prepared, slots: list[dict[str, Any]]) -> dict[str, Any]:
        result = prepared.result
        leaves = list(result) if isinstance(result, tuple | list) else [result]
        reports = []
        for index, leaf in enumerate(leaves[:64]):
            report = describe(leaf, prepared.storages)
            if index < len(slots) and report.get("tensor"):
                report["copied"] = self._copy(leaf, slots[index])
            reports.append(report)
        self._synchronize()
        report = {"outputs": reports, "count": len(leaves), "structure": type(result).__name__}
        return {**report, **self._usage(), **self._shared()}

    def _shared(self) -> dict[str, Any]:
        """What the kernel file did to the process it shares with this code; looked at once after each run."""
        if self.shared is None:
            self.shared = self._look_around()
        return self.shared

    def _look_around(self) -> dict[str, Any]:
        assert self.before is not None
        return {"hooked": _hooked(), "patched": self.before.patched(), "switched": self.before.switched()}

    def _copy(self, leaf: torch.Tensor, slot: dict[str, Any]) -> bool:
        assert self.memory is not None
        nbytes = leaf.numel() * leaf.element_size()
        if nbytes > slot["nbytes"] or leaf.device.type != self.memory.device.type or leaf.layout != torch.strided:
            return False
        if nbytes:
            target = self.memory.bytes(slot)[:nbytes].view(leaf.dtype).view(leaf.shape)
            target.copy_(leaf.detach())
        return True

    def _usage(self) -> dict[str, Any]:
        if self._cuda():
            return {"peak_memory_mb": torch.cuda.max_memory_allocated() / 1e6}
        return {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def _addresses(result: Any) -> list[int]:
    """Where the leaves of a result begin: the judge looks there itself."""
    leaves = result if isinstance(result, tuple | list) else (result,)
    return [leaf.data_ptr() for leaf in leaves[:64] if type(leaf) is torch.Tensor]


def _hooked() -> bool:
    """Whether code of the kernel would run inside the worker's own calls."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()  # noqa: SLF001
    return modes > 0 or sys.getprofile() is not None or sys.gettrace() is not None


def _storages_of(result: Any) -> list[StorageWeakRef]:
    """Weak references to the memory of a result; none to that of an empty tensor, which may be shared."""
    leaves = result if isinstance(result, tuple | list) else [result]
    plain = [leaf for leaf in leaves[:64] if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    return [StorageWeakRef(leaf.untyped_storage()) for leaf in plain if leaf.numel()]


def _any_alive(storages: list[StorageWeakRef]) -> bool:
    """Whether somebody else holds on to some of this memory: not a reference cycle, not a thread about to let go."""
    if all(storage.expired() for storage in storages):
        return False
    gc.collect()
    for _ in range(RELEASE_TRIES):
        if all(storage.expired() for storage in storages):
            return False
        time.sleep(RELEASE_STEP_S)
    return not all(storage.expired() for storage in storages)


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT // 2] + "\n...\n" + text[-MAX_TEXT // 2 :]


def serve(channel: socket.socket, request: dict[str, Any], layers: list[list[Any]]) -> None:
    """Answer the judge's frames until it closes the channel. The top frame of a worker: every failure is told."""
    torch.set_grad_enabled(False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    frames.send(channel, {"layers": layers, "address": id(layers)})
    worker = Worker(request)
    while True:
        received = frames.receive_with_descriptors(channel)
        if received is None:
            return
        body, descriptors = received
        try:
            verb = body["verb"]
            answer = worker.attach(body, descriptors) if verb == "attach" else worker.verbs[verb](body)
        except BaseException as error:
            answer = _failure(error)
        frames.send(channel, {**answer, "id": body.get("id", "")})


def _failure(error: BaseException) -> dict[str, Any]:
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in _message(error) for sign in OUT_OF_MEMORY_SIGNS
    )
    text = _clipped("".join(traceback.format_exception(error, limit=-20)))
    return {"raised": type(error).__name__[:200], "message": _clipped(_message(error)), "trace": text, "memory": memory}


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as nested:
        return f"(its text raised {type(nested).__name__})"

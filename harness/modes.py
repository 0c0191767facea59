"""The ways a user can run a whole model today, each warmed up as a call without arguments.

Every mode keeps its own compiled code and CUDA graphs alive side by side, so that they can be timed interleaved.
"""

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.latency import Call

OVERNIGHT = "overnight"
EAGER = "eager"
EAGER_GRAPH = "eager_graph"
COMPILE = "compile"
REDUCE_OVERHEAD = "reduce_overhead"
MAX_AUTOTUNE = "max_autotune"
MODES = (OVERNIGHT, EAGER, EAGER_GRAPH, COMPILE, REDUCE_OVERHEAD, MAX_AUTOTUNE)

WARM_UP_CALLS = 3
MIB = 1024.0 * 1024.0


@dataclass(frozen=True)
class ModelCall:
    """A model and the inputs it is measured on."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    on_gpu: bool


def why_not(mode: str, requested: Sequence[str], *, on_gpu: bool) -> str | None:
    """The reason for leaving a mode out, or None to run it."""
    if requested and mode not in requested:
        return "not requested"
    if on_gpu:
        return None
    if mode == EAGER_GRAPH:
        return "CUDA graphs need a CUDA device"
    if mode == REDUCE_OVERHEAD:
        return "without CUDA graphs this is the default compile mode"
    if mode == MAX_AUTOTUNE and not requested:
        return "slow to compile on a CPU; name it in the requested modes to measure it"
    return None


def build_mode(mode: str, subject: ModelCall, ours: nn.Module | None) -> Call:
    """A warm call of `subject` in `mode`; `ours` is the model with its kernels. Raises what torch raises."""
    call = _BUILDERS[mode](subject, ours)
    for _ in range(WARM_UP_CALLS):
        call()
    return call


def _bound(function: Callable[..., Any], subject: ModelCall) -> Call:
    args, kwargs = subject.args, dict(subject.kwargs)
    return lambda: function(*args, **kwargs)


def _overnight(subject: ModelCall, ours: nn.Module | None) -> Call:
    if ours is None:
        raise ValueError("the mode 'overnight' needs the optimised model")
    return _bound(ours, subject)


def _compiled(subject: ModelCall, mode: str) -> Call:
    call = _bound(torch.compile(subject.model, mode=mode), subject)
    if mode == "default" or not subject.on_gpu:
        return call

    def stepped() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return stepped


def _eager_graph(subject: ModelCall, _: nn.Module | None) -> Call:
    """The eager model as one CUDA graph over fixed inputs, replayed; outputs are those of the last replay."""
    call = _bound(subject.model, subject)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _repeat in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


_BUILDERS: Mapping[str, Callable[[ModelCall, nn.Module | None], Call]] = {
    OVERNIGHT: _overnight,
    EAGER: lambda subject, _: _bound(subject.model, subject),
    EAGER_GRAPH: _eager_graph,
    COMPILE: lambda subject, _: _compiled(subject, "default"),
    REDUCE_OVERHEAD: lambda subject, _: _compiled(subject, "reduce-overhead"),
    MAX_AUTOTUNE: lambda subject, _: _compiled(subject, "max-autotune"),
}


def held_bytes(*, on_gpu: bool) -> int:
    """Device memory that this process has reserved once garbage is gone; 0 on a CPU."""
    if not on_gpu:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def peak_memory_mb(call: Call, subject: ModelCall, kept_bytes: int) -> float | None:
    """MiB at the peak of one warm call.

    On a GPU: the model's tensors, what the mode keeps reserved between calls (`kept_bytes`: graph pools, workspaces),
    and what one call allocates on top. On a CPU: the process's largest resident size during the call, which includes
    Python, torch and the other modes; None where Linux does not let us reset it.
    """
    if not subject.on_gpu:
        return _peak_resident_mb(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    own = sum(t.numel() * t.element_size() for t in (*subject.model.parameters(), *subject.model.buffers()))
    return (own + max(0, kept_bytes) + torch.cuda.max_memory_allocated() - before) / MIB


def _peak_resident_mb(call: Call) -> float | None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        call()
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024.0 if found else None

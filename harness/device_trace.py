"""Times a compiled model on a GPU: kernels per statement of its generated code, and the whole under CUDA graphs.

The statements' kernels are told apart in a profiler trace of the instrumented code without graphs (a kernel belongs to
the span in which its launch happened); the model's total and its busy time are of graph replays, and the kernels' times
are scaled to that busy time. A trace without device events is an error, never an empty profile.
"""

import json
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness import marks
from harness.errors import MachineError
from harness.instrument import compile_instrumented, instrumenting
from harness.loading import LoadedModel
from harness.marks import SPAN_PREFIX, Marking
from harness.measured import Measured

TRACE_RUNS = 5
WALL_RUNS = 50
WALL_BUDGET_S = 5.0
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SCALE_LIMITS = (0.6, 1.6)


def measure_cuda(loaded: LoadedModel) -> Measured:
    """Times of the deployed mode (reduce-overhead). Raises MachineError when the profiler sees no device events."""
    made = compile_instrumented(loaded.model, {"triton.cudagraphs": False})
    with torch.no_grad():
        with instrumenting(made):
            made.call(*loaded.args, **loaded.kwargs)
        made.require_statements()
        spent = _spans(lambda: made.call(*loaded.args, **loaded.kwargs))
        total_ms, busy_ms, notes = _graphed(loaded)
    traced_us = sum(spent.values())
    scale = 1e3 * busy_ms / traced_us if busy_ms else 1.0
    if not SCALE_LIMITS[0] <= scale <= SCALE_LIMITS[1]:
        notes.append(f"kernels take {scale:.2f} times as long in graph replays as traced; times are scaled by that")
    return Measured(
        "reduce-overhead",
        total_ms,
        {statement: us * scale for statement, us in spent.items()},
        made.statements,
        made.graphs,
        tuple(notes),
    )


def _spans(call: Callable[[], Any]) -> dict[int, float]:
    """µs of device time per statement and forward."""
    for _ in range(3):
        call()

    def marked() -> None:
        marks.start(Marking.SPAN)
        call()
        marks.stop()

    events = trace(marked, TRACE_RUNS)
    launches = launches_of(events)
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), int(e["name"].removeprefix(SPAN_PREFIX)))
        for e in events
        if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith(SPAN_PREFIX)
    )
    if not spans:
        raise MachineError("the profiler recorded no spans of the compiled code; torch.profiler does not work here")
    starts = [start for start, _, _ in spans]
    spent: dict[int, float] = {}
    for event in device_events(events):
        launched = launches.get(event.get("args", {}).get("correlation"), -1.0)
        index = bisect_right(starts, launched) - 1
        if index >= 0 and launched <= spans[index][1]:
            statement = spans[index][2]
            spent[statement] = spent.get(statement, 0.0) + float(event["dur"]) / TRACE_RUNS
    return spent


def launches_of(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """When each piece of device work was launched, by its correlation number."""
    return {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }


def _graphed(loaded: LoadedModel) -> tuple[float, float, list[str]]:
    """The compiled model under CUDA graphs: median wall ms, device busy ms, notes."""
    torch._dynamo.reset()  # noqa: SLF001 - the public way to start afresh
    compiled = torch.compile(loaded.model, mode="reduce-overhead", dynamic=False)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*loaded.args, **loaded.kwargs)

    for _ in range(4):
        call()
    torch.cuda.synchronize()
    walls: list[float] = []
    deadline = time.perf_counter() + WALL_BUDGET_S
    while len(walls) < WALL_RUNS and (len(walls) < 10 or time.perf_counter() < deadline):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        walls.append(1e3 * (time.perf_counter() - start))
    events = device_events(trace(call, TRACE_RUNS))
    busy = busy_us(events) / TRACE_RUNS / 1e3
    return median(walls), busy, []


def trace(call: Callable[[], Any], runs: int) -> list[dict[str, Any]]:
    """The profiler's raw events of some runs."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def device_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ran on the device; raises MachineError when nothing did."""
    found = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if not found:
        raise MachineError(
            "torch.profiler returned no device events: CUPTI is not usable here (another profiler attached, or no "
            "permission); no profile can be made"
        )
    return found


def busy_us(events: Sequence[dict[str, Any]]) -> float:
    """Time during which something ran on the device: overlapping kernels count once."""
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        if end > reached:
            busy += end - max(start, reached)
            reached = end
    return busy

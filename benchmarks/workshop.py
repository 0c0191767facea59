"""What a worker costs and how still the clock is: fork, first call, and identical kernels against each other (A/A).

Run: `python benchmarks/workshop.py [--device cpu|cuda] [--pairs 12] [--bisect]`. Prints one JSON object per
line. Times are this machine's at this moment: on a shared CPU look at the ratios alone.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from harness.arena import Arena, Slot
from harness.errors import MachineError
from harness.worker import sandbox
from harness.workshop import (
    Execution,
    KernelRaised,
    PreparedCall,
    Worker,
    WorkerDied,
    WorkerTimeout,
    Workshop,
)

SOFTMAX = "import torch\ndef kernel_fn(x):\n    return torch.softmax(x, -1)\n"
BUFFERS = 8


def say(name: str, **values: object) -> None:
    """Print one finding."""
    print(json.dumps({"what": name, **values}), flush=True)


def milliseconds(begin: float) -> float:
    """Since `begin`, rounded."""
    return round((time.perf_counter() - begin) * 1e3, 2)


def forks(shop: Workshop, arena: Arena, slot: Slot, out: Slot, count: int = 5) -> None:
    """Open, load, first call, second call, close; the median of `count` workers."""
    rows: list[list[float]] = []
    for _ in range(count):
        row = []
        begin = time.perf_counter()
        worker = shop.open(SOFTMAX, arena)
        row.append(milliseconds(begin))
        call = partial(worker.call, [slot], {}, [out], 60)
        for step in (partial(worker.load, 60), call, call, worker.close):
            begin = time.perf_counter()
            step()
            row.append(milliseconds(begin))
        rows.append(row)
    names = ("open_ms", "load_ms", "first_call_ms", "second_call_ms", "close_ms")
    columns = [statistics.median(column) for column in zip(*rows, strict=True)]
    say("worker", **dict(zip(names, columns, strict=True)))


def measured(worker: Worker, repeats: int, *, flush: bool) -> float:
    """Seconds of one timed block: the device's where there is one."""
    sample = worker.time(repeats, 60, flush=flush)
    return sample.device_seconds if sample.device_seconds is not None else sample.seconds


def identical(shop: Workshop, arena: Arena, calls: list[PreparedCall], pairs: int, execution: Execution) -> None:
    """Ratios of two workers that run the same kernel, measured A B B A."""
    cuda = shop.device != "cpu"
    with shop.open(SOFTMAX, arena, execution=execution) as a, shop.open(SOFTMAX, arena, execution=execution) as b:
        for worker in (a, b):
            worker.load(60)
            prepared = worker.prepare(calls, 300)
        repeats = max(1, int(0.02 / max(a.time(1, 60).seconds, 1e-6)))
        ratios, begin = [], time.perf_counter()
        for _ in range(pairs):
            first, second = measured(a, repeats, flush=cuda), measured(b, repeats, flush=cuda)
            third, fourth = measured(b, repeats, flush=cuda), measured(a, repeats, flush=cuda)
            ratios.append((second + third) / (first + fourth))
        seconds = time.perf_counter() - begin
        per_call_us = measured(a, repeats, flush=cuda) / repeats / len(calls) * 1e6
    say(
        "A/A",
        execution=execution.value,
        graphed=prepared.graphed,
        median=round(statistics.median(ratios), 5),
        low=round(min(ratios), 5),
        high=round(max(ratios), 5),
        sd=round(statistics.stdev(ratios), 5),
        seconds_a_pair=round(seconds / pairs, 3),
        per_call_us=round(per_call_us, 2),
    )


def bisect(device: str) -> None:
    """Which layers of the sandbox a worker of this device bears: all, none, and all but each one."""
    layers = [layer.name for layer in sandbox.probe()]
    arena = Arena(device, 64 << 20)
    slot, out = arena.place(torch.ones(64, 64, device=device)), arena.reserve((64, 64), torch.float32)
    for name, without in (("all", []), ("none", layers), *((f"all but {layer}", [layer]) for layer in layers)):
        with Workshop(device, without=without) as shop:
            try:
                with shop.open(SOFTMAX, arena) as worker:
                    worker.load(60)
                    worker.call([slot], {}, [out], 60)
                say(name, works=True)
            except (MachineError, KernelRaised, WorkerDied, WorkerTimeout) as error:
                say(name, works=False, error=str(error)[:500])


def main() -> None:
    """Print every finding for one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--bisect", action="store_true", help="only try the sandbox's layers one by one")
    options = parser.parse_args()
    if options.bisect:
        bisect(options.device)
        return
    shape = (8192, 4096) if options.device != "cpu" else (256, 2048)
    dtype = torch.float16 if options.device != "cpu" else torch.float32
    begin = time.perf_counter()
    with Workshop(options.device) as shop:
        say("warm parent", start_ms=milliseconds(begin))
        say("sandbox", layers=shop.layers)
        bytes_each = shape[0] * shape[1] * dtype.itemsize
        arena = Arena(options.device, (BUFFERS + 2) * bytes_each + (64 << 20))
        slots = [arena.place(torch.randn(shape, device=options.device).to(dtype)) for _ in range(BUFFERS)]
        out = arena.reserve(shape, dtype)
        forks(shop, arena, slots[0], out)
        for execution in (Execution.PLAIN, Execution.OP):
            for _ in range(3):
                identical(shop, arena, [PreparedCall((slot,)) for slot in slots], options.pairs, execution)
        arena.close()


if __name__ == "__main__":
    main()

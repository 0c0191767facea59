"""What the judge costs and whether it keeps what is no faster.

    python benchmarks/judge.py [--device cpu|cuda]                  one table: refusals, a full verdict per op, memory
    python benchmarks/judge.py --identical 50 [--seconds 280]       candidates that differ in comments, names, dead code
    python benchmarks/judge.py --faster 2 --runs 10 --device cuda   a kernel that does so many per cent less work

All times are wall-clock seconds of one judge that is warm: its courtroom open, its next worker forked.
"""

import argparse
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from harness.judge import Judge, silent
from harness.records import NAMED_OPS, JudgeRequest, Verdict

ROOT = Path(__file__).resolve().parent.parent
RIGHT = "import torch\n\n\ndef kernel_fn(x):\n    return torch.softmax(x, dim=-1)\n"
HOPELESS = {
    "syntax error": "def kernel_fn(x:\n    return x\n",
    "wrong result": "import torch\n\n\ndef kernel_fn(x):\n    return torch.zeros_like(x)\n",
    "hang": "def kernel_fn(x):\n    while True:\n        pass\n",
}
EXTRA = re.compile(r"_softmax\[\(rows,\)\]")


class Peak:
    """The most memory that this process and everything below it held at once, sampled five times a second."""

    def __init__(self, device: str) -> None:
        self.host_mb = self.device_mb = 0.0
        self._device, self._over = device, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            me = psutil.Process()
            total = 0
            for process in (me, *me.children(recursive=True)):
                with suppress(psutil.Error):
                    total += process.memory_info().rss - process.memory_info().shared
            self.host_mb = max(self.host_mb, total / 1e6)
            if self._device == "cuda":
                free, whole = torch.cuda.mem_get_info()
                self.device_mb = max(self.device_mb, (whole - free) / 1e6)

    def stop(self) -> str:
        """Both figures in words."""
        self._over.set()
        self._thread.join()
        return f"{self.host_mb:.0f} MB host" + (f", {self.device_mb:.0f} MB device" if self.device_mb else "")


def timed(judge: Judge, request: JudgeRequest) -> tuple[float, Verdict]:
    """Seconds of one verdict."""
    begin = time.perf_counter()
    verdict = judge.judge(request, silent)
    return time.perf_counter() - begin, verdict


def kernel(op: str, device: str) -> str:
    """The starter kernel of an op for this device, the library's own where there is none."""
    folders = ("cpp",) if device == "cpu" else ("triton", "cuda")
    paths = [ROOT / "kernels" / folder / f"{op}.py" for folder in folders]
    found = next((path for path in paths if path.is_file()), None)
    if found is not None:
        return found.read_text(encoding="utf-8")
    reference: str = importlib.import_module(f"harness.specs.{op}").SPEC.reference
    return reference.replace("def reference", "def kernel_fn")


def costs(judge: Judge, device: str, deadline: float) -> None:
    """The table of refusals and full verdicts."""
    peak = Peak(device)
    timed(judge, JudgeRequest("softmax", RIGHT, device=device, bench=False))
    print("| what | seconds | verdict |\n|---|---|---|")
    for name, source in HOPELESS.items():
        seconds, verdict = timed(judge, JudgeRequest("softmax", source, device=device))
        print(f"| {name} | {seconds:.2f} | {verdict.status}, {verdict.stage} |", flush=True)
    found = []
    for op in NAMED_OPS:
        if time.monotonic() > deadline:
            print(f"| full verdict, {op} | not run | out of time |", flush=True)
            continue
        timed(judge, JudgeRequest(op, kernel(op, device), device=device))  # opens the courtroom, measures the baselines
        seconds, verdict = timed(judge, JudgeRequest(op, kernel(op, device), device=device, trials=1))
        found.append(seconds)
        print(f"| full verdict, {op} | {seconds:.2f} | {verdict.status}: {verdict.detail[:80]} |", flush=True)
    if found:
        middle = median(found)
        print(f"| median of {len(found)} ops | {middle:.2f} | {3600 / middle:.0f} experiments an hour |")
    print(f"| peak memory | | {peak.stop()} |")


def variant(source: str, number: int) -> str:
    """The same kernel with another comment, another name and some dead code."""
    renamed = re.sub(r"\bmaximum\b|\btop\b", f"top_{number}", source)
    return f"# attempt {number}\n{renamed}\n\ndef _never_called_{number}(value):\n    return value * {number}\n"


def identical(judge: Judge, device: str, count: int, deadline: float) -> None:
    """Judge variants of one kernel against it; every keep is an error."""
    op = "softmax"
    source, kept, undecided, done = kernel(op, device), 0, 0, 0
    for number in range(count):
        if time.monotonic() > deadline:
            break
        request = JudgeRequest(op, variant(source, number), incumbent=source, device=device, trials=number)
        _, verdict = timed(judge, request)
        done += 1
        kept += verdict.status == "keep"
        undecided += not verdict.accepted
        if verdict.status == "keep" or not verdict.accepted:
            print(f"candidate {number}: {verdict.status}, {verdict.guard}: {verdict.detail}", flush=True)
    print(f"identical candidates: {done} judged on {device}, {kept} kept, {undecided} without a verdict")


def faster(judge: Judge, device: str, per_cent: float, runs: int, deadline: float) -> None:
    """An incumbent that does `per_cent` more rows twice, against the kernel that does each row once."""
    source = (ROOT / "tests" / "redteam" / "honest" / "triton_softmax.py").read_text(encoding="utf-8")
    slower = EXTRA.sub(f"_softmax[(rows + int(rows * {per_cent / 100}),)]", source)
    slower = slower.replace("tl.program_id(0).to(tl.int64)", "(tl.program_id(0) % rows).to(tl.int64)")
    slower = slower.replace("x_col, columns, BLOCK", "x_col, columns, rows, BLOCK")
    slower = slower.replace("x.stride(1), columns, BLOCK", "x.stride(1), columns, rows, BLOCK")
    assert slower.count("rows, BLOCK") == 2
    kept, seen = 0, []
    for _ in range(runs):
        if time.monotonic() > deadline:
            break
        _, verdict = timed(judge, JudgeRequest("softmax", source, incumbent=slower, device=device))
        kept += verdict.status == "keep"
        seen.append(f"{verdict.timing.speedup_vs_best:.4f}" if verdict.timing else f"{verdict.status}/{verdict.guard}")
    print(f"{per_cent:g}% less work: kept in {kept} of {len(seen)} runs: {', '.join(seen)}")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--identical", type=int, metavar="COUNT")
    parser.add_argument("--faster", type=float, metavar="PERCENT")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after so many")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    judge = Judge()
    work: Callable[[], None] = lambda: costs(judge, options.device, deadline)  # noqa: E731
    if options.identical:
        work = lambda: identical(judge, options.device, options.identical, deadline)  # noqa: E731
    if options.faster:
        work = lambda: faster(judge, options.device, options.faster, options.runs, deadline)  # noqa: E731
    try:
        work()
    finally:
        judge.close()


if __name__ == "__main__":
    main()

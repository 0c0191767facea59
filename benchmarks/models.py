"""One row of the whole-model table: every way to run a model today, and Overnight, interleaved in one process.

    python benchmarks/models.py models/gpt2.py:GPT2 --dtype float16 --session .overnight/gpt2

`--session` is a session's folder: its targets, and the kernels kept in its worktree. Without it, Overnight runs no
kernel and shows what the wrapper costs. A row counts only when it says that the outputs are right.
"""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from harness import wire
from harness.errors import OvernightError
from harness.kernel_op import read_kernel
from harness.loading import load_model
from harness.modes import MODES
from harness.optimized import optimize
from harness.records import KeptKernel, ModelSpec, VerifyReport
from harness.verify import Builder, verify_model


def main() -> int:
    """Print one row; exit 1 when outputs differ, 2 or 3 when the model cannot be measured."""
    options = _parser().parse_args()
    try:
        kernels = [read_kernel(kept) for kept in session_kernels(options.session)] if options.session else []
        loaded = load_model(_spec(options))
        report = verify_model(
            loaded,
            kernels,
            _say,
            modes=tuple(options.modes),
            bisect=options.bisect,
            budget_s=options.seconds,
            build=_builder(options),
        )
    except OvernightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(wire.to_json(report) if options.json else table(report, str(loaded.dtype), len(kernels)))
    return 0 if report.outputs_ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="MODEL as `overnight profile` takes it")
    parser.add_argument("--model-args", action="append", default=[], metavar="K=V")
    parser.add_argument("--inputs", metavar="FILE.py:FN")
    parser.add_argument("--input-shape", action="append", default=[], metavar="1,512")
    parser.add_argument("--weights")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--session", type=Path, metavar="FOLDER", help="a session's folder, .overnight/NAME")
    parser.add_argument("--modes", nargs="*", default=[], choices=MODES)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the interleaved rounds")
    parser.add_argument("--inductor", action="append", default=[], metavar="OPTION=JSON", help="for Overnight's rest")
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def _spec(options: argparse.Namespace) -> ModelSpec:
    return ModelSpec(
        _absolute(options.model),
        weights=str(Path(options.weights).resolve()) if options.weights else None,
        model_args=dict(item.split("=", 1) for item in options.model_args),
        inputs=_absolute(options.inputs) if options.inputs else None,
        input_shapes=tuple(tuple(int(size) for size in shape.split(",")) for shape in options.input_shape),
        device=options.device,
        dtype=options.dtype,
    )


def _builder(options: argparse.Namespace) -> Builder:
    """Overnight's mode: its kernels, and what the options say about the rest of the model."""
    inductor = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.inductor)}
    return partial(optimize, under_compile=False, inductor=inductor)


def _absolute(reference: str) -> str:
    """FILE.py:NAME or a path, made absolute; package.module:NAME as it is."""
    path, _, name = reference.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}"
    return str(Path(reference).resolve()) if Path(reference).exists() else reference


def session_kernels(folder: Path) -> list[KeptKernel]:
    """The kernels at the tip of a session's branch, with their targets."""
    kernels = folder / "worktree" / "kernels"
    return [
        KeptKernel(str(target), source.read_text(encoding="utf-8"))
        for target in sorted((folder / "targets").glob("*.json"))
        for source in sorted(kernels.glob(f"*/{target.stem}.py"))
    ]


def _say(name: str, body: Mapping[str, Any]) -> None:
    print(f"{name}: {json.dumps(dict(body))}", file=sys.stderr, flush=True)


def table(report: VerifyReport, dtype: str, kernels: int) -> str:
    """Markdown: the row, what it was measured on, and the command that reproduces it."""
    where = (
        f"{report.device_name}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {dtype.removeprefix('torch.')}, {kernels} kernels, "
        f"{report.sites.applied} call sites applied, {report.sites.fallback} not"
    )
    command = " ".join(["python", *(shlex.quote(argument) for argument in sys.argv)])
    lines = [
        f"`{command}`",
        "",
        where,
        "",
        "| mode | median ms | 95% interval | peak MiB |",
        "|---|---|---|---|",
    ]
    for mode in report.modes:
        if mode.median_ms is None:
            lines.append(f"| {mode.mode} | - | {mode.reason} | - |")
        else:
            peak = "-" if mode.peak_memory_mb is None else f"{mode.peak_memory_mb:.0f}"
            lines.append(f"| {mode.mode} | {mode.median_ms:.4f} | {mode.ci_low:.4f}-{mode.ci_high:.4f} | {peak} |")
    best = "-" if report.model_speedup is None else f"{report.model_speedup:.3f}x"
    eager = "-" if report.model_speedup_vs_eager is None else f"{report.model_speedup_vs_eager:.3f}x"
    verdict = "right" if report.outputs_ok else "WRONG"
    result = (
        f"Best of the others / Overnight: {best}; eager / Overnight: {eager}; "
        f"faster: {'yes' if report.faster else 'no'}; outputs {verdict}, largest difference {report.max_error:.3g}."
    )
    notes = [report.detail, f"Suspects: {', '.join(report.suspects)}" if report.suspects else ""]
    return "\n".join([*lines, "", result, *(note for note in notes if note)])


if __name__ == "__main__":
    sys.exit(main())

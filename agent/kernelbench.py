"""A folder of KernelBench problems: what became of each, and the benchmark's figures over them. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from agent.errors import InputError

THRESHOLDS = (1.0, 1.5, 2.0)
PROBLEM_FUNCTIONS = ("class Model", "def get_inputs", "def get_init_inputs")


class Fate(StrEnum):
    """What became of one problem."""

    SOLVED = "solved"  # a ModelNew was written, judged and accepted
    NO_KERNEL = "no_kernel"  # nothing that was tried is faster in the model
    REFUSED = "refused"  # the written ModelNew was not accepted
    DEGENERATE = "degenerate"
    TOO_LARGE = "too_large"
    UNUSABLE = "unusable"  # the file, or what its session could not do with it


COUNTED = {Fate.SOLVED, Fate.NO_KERNEL, Fate.REFUSED}
"""The problems that fast_p is a share of."""


@dataclass(frozen=True)
class Result:
    """One problem's row. Speedups are of the written ModelNew; None where there is none."""

    problem: str
    fate: Fate
    detail: str = ""
    speedup_vs_pytorch: float | None = None
    speedup_vs_best: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    experiments: int = 0
    kept: int = 0
    seconds: float = 0.0
    model_new: str = ""

    def speedup(self, *, best: bool) -> float:
        """What a user gains over eager PyTorch (or over the faster of it and torch.compile): 1 with the original."""
        own = self.speedup_vs_best if best else self.speedup_vs_pytorch
        return own if self.fate is Fate.SOLVED and own is not None else 1.0


def problem_files(folder: Path) -> list[Path]:
    """The problem files below a folder in natural order; raises InputError when there is none."""
    if not folder.is_dir():
        raise InputError(f"DIR {folder} is no folder: give one with KernelBench problem files.")
    files = [path for path in folder.rglob("*.py") if _is_problem(path)]
    if not files:
        raise InputError(f"{folder} holds no KernelBench problem (a .py file with Model, get_inputs, get_init_inputs).")
    return sorted(files, key=lambda path: [_natural(part) for part in path.relative_to(folder).parts])


def _is_problem(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts[-3:]) or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return all(function in text for function in PROBLEM_FUNCTIONS) and "class ModelNew" not in text


def _natural(name: str) -> list[tuple[int, str]]:
    """Digits by value, so that 2 comes before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def resized(text: str, sizes: Mapping[str, int]) -> str:
    """A problem's text with the whole numbers at its top changed, those that it has."""
    for name, size in sizes.items():
        text = re.sub(rf"(?m)^{re.escape(name)}\s*=\s*\d+\s*(?=#|$)", f"{name} = {size}  ", text)
    return text


def session_name(folder: Path, path: Path) -> str:
    """The name of a problem's session: `kb-` and its path below the folder."""
    stem = "-".join(path.relative_to(folder).with_suffix("").parts)
    return "kb-" + (re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-") or "problem")


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """fast_p (the share of judged problems solved more than p times as fast), geometric mean and median.

    A problem without an accepted kernel counts as 1: its user keeps the original.
    """
    counted = [one for one in results if one.fate in COUNTED]
    fates = {fate.value: sum(one.fate is fate for one in results) for fate in Fate}
    return {
        "problems": len(results),
        "judged": len(counted),
        **fates,
        "vs_eager": _figures(counted, best=False),
        "vs_best_of_eager_and_compile": _figures(counted, best=True),
    }


def _figures(counted: Sequence[Result], *, best: bool) -> dict[str, Any]:
    speedups = [one.speedup(best=best) for one in counted]
    if not speedups:
        return {"fast_p": {f"{bar:g}": None for bar in THRESHOLDS}, "geometric_mean": None, "median": None}
    return {
        "fast_p": {f"{bar:g}": sum(value > bar for value in speedups) / len(speedups) for bar in THRESHOLDS},
        "geometric_mean": math.exp(sum(map(math.log, speedups)) / len(speedups)),
        "median": median(speedups),
    }

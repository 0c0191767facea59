"""Whether a check of chosen sizes fits into memory, asked before anything is allocated."""

from math import prod

import psutil
import torch

from harness.errors import InputError
from harness.problem import Case, Problem
from harness.stages import input_bytes
from harness.truth import compile_reference, original

COPIES = {"cpu": 12, "cuda": 10}
"""A case in memory so often: calls in a row in the arena, the original, float64 truth, rounding noise."""


def must_fit(problem: Problem) -> None:
    """Raise InputError when the largest case needs more memory than is free."""
    cases = [case for stage in problem.cases.values() for case in stage] + list(problem.bench)
    needed = COPIES[problem.device] * max(input_bytes(case) + _output_bytes(problem, case) for case in cases)
    free = _free_bytes(problem.device)
    if needed > free:
        said = f"judging {problem.target} at these sizes needs about {needed / 1e9:.3g} GB of memory"
        raise InputError(f"--shape: {said}, and {free / 1e9:.3g} GB are free here; choose smaller sizes")


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def _output_bytes(problem: Problem, case: Case) -> int:
    """Bytes of the outputs, found on tensors without memory; 0 where the reference needs real ones."""
    try:
        inputs = [torch.empty(d.shape, dtype=getattr(torch, d.dtype), device="meta") for d in case.inputs]
        outputs = original(compile_reference(problem.reference), inputs, case.constants)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return 0
    return sum(prod(leaf.shape) * leaf.element_size() for leaf in outputs)

"""Finds problems that any answer, or a stored one, would solve: nothing judged by them means anything.

Every input and every weight is moved, the inputs alone are moved, and the size of the outputs is looked at; names
play no part. Does not find a problem whose output depends on its inputs in too simple a way to need a kernel.
"""

import torch

from harness.compare import Expected
from harness.oracle import Oracle
from harness.problem import Case
from harness.truth import widened

BENCHMARK_TOLERANCE = 1e-2
"""Absolute and relative tolerance of the benchmark as published (KernelBench v0: torch.allclose with 1e-2)."""


def why_degenerate(oracle: Oracle, own: Case, moved: Case) -> str | None:
    """Why nobody can be judged by this problem, or None. `own` draws its own values, `moved` other weights as well."""
    first, second, third = oracle.ask(own), oracle.ask(own), oracle.ask(moved)
    if any(leaf.original.numel() == 0 for leaf in first.expected):
        return "one of its outputs is empty"
    if not any(_differs(one, two) for one, two in zip(first.expected, second.expected, strict=True)):
        names = ", ".join(draw.name for draw in own.inputs if draw.role != "weight")
        if not any(_differs(one, two) for one, two in zip(first.expected, third.expected, strict=True)):
            return f"its output is constant by algebra ({_value(first.expected)}), whatever its inputs and weights are"
        return (
            f"its output does not depend on its inputs ({names}): what they change in it is no more than rounding noise"
        )
    if all(_zeros_pass(leaf.original) for question in (first, second) for leaf in question.expected):
        largest = max(float(leaf.original.abs().max()) for leaf in first.expected)
        return (
            f"its outputs are at the noise floor: none is larger than {largest:.2g}, so that all zeros pass within"
            f" KernelBench's tolerance of {BENCHMARK_TOLERANCE:g}: scale them, or its inputs, to be judged by it"
        )
    return None


def _differs(one: Expected, two: Expected) -> bool:
    """Whether two answers differ by more than the original's own rounding."""
    if not one.original.is_floating_point() and not one.original.is_complex():
        return not torch.equal(one.original, two.original)
    if not torch.equal(one.truth.isfinite(), two.truth.isfinite()):
        return True
    signal = _largest(one.truth - two.truth)
    noise = max(_largest(widened(leaf.original) - leaf.truth) for leaf in (one, two))
    return signal > noise


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _zeros_pass(value: torch.Tensor) -> bool:
    if not value.is_floating_point():
        return False
    return torch.allclose(torch.zeros_like(value), value, rtol=BENCHMARK_TOLERANCE, atol=BENCHMARK_TOLERANCE)


def _value(expected: tuple[Expected, ...]) -> str:
    """The constant in a few words."""
    leaf = expected[0].original
    first = leaf.flatten()[0].item()
    return f"{first:.3g} everywhere" if bool((leaf == leaf.flatten()[0]).all()) else "the same in every call"

"""Tries the yardstick on known answers before any candidate is judged by it.

The exact answer must pass; zeros, a constant, a copied input, first rows only and a forgotten last column must fail
on inputs built to show them; perturbing the inputs must show. Otherwise the target cannot be judged, and why is said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.compare import Expected, compare_all
from harness.oracle import Oracle, Question
from harness.records import Role
from harness.truth import Leaves, widened

Mutant = Callable[[Question], Leaves | None]

TWICE = 2.0


@dataclass(frozen=True)
class Calibration:
    """`unjudgeable` is the reason why the target is refused, or None; notes say which mutants do not apply."""

    unjudgeable: str | None
    notes: tuple[str, ...] = ()


def calibrate(oracle: Oracle) -> Calibration:
    """Run all mutants over the calibration cases of a problem."""
    problem = oracle.problem
    if problem.degenerate is not None and (reason := problem.degenerate(oracle)) is not None:
        return Calibration(reason)
    survivors: dict[str, bool] = {}
    notes: list[str] = []
    for case in oracle.problem.calibration:
        question = oracle.ask(case)
        if (mismatch := compare_all(_exact(question), question.expected)) is not None:
            return Calibration(f"the exact answer itself is refused on {case.name}: {mismatch.reason}")
        for name, wrong in _mutants(oracle, question):
            caught = compare_all(wrong, question.expected) is not None
            key = f"{name} ({case.dtype})"
            survivors[key] = survivors.get(key, True) and not caught
        notes += _precision(oracle, question, survivors)
    alive = [name for name, survived in survivors.items() if survived]
    if alive:
        return Calibration(f"these wrong answers would pass for right ones: {', '.join(alive)}", tuple(notes))
    return Calibration(None, tuple(dict.fromkeys(notes)))


def _exact(question: Question) -> Leaves:
    return tuple(leaf.truth.to(leaf.original.dtype) for leaf in question.expected)


def _mutants(oracle: Oracle, question: Question) -> Iterator[tuple[str, Leaves]]:
    right = _exact(question)
    for name, build in _OUTPUT_MUTANTS.items():
        wrong = tuple(build(leaf) for leaf in right)
        if any(not torch.equal(a, b) for a, b in zip(wrong, right, strict=True)) or name in {"zeros", "a constant"}:
            yield name, wrong
    yield from _copies(question, right)
    yield from _blind(oracle, question)


def _constant(leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.is_floating_point():
        return torch.full_like(leaf, int(leaf.flatten()[0].item()) if leaf.numel() else 0)
    return torch.full_like(leaf, float(widened(leaf).mean().item()) if leaf.dim() else 0.0)


def _first_rows(leaf: torch.Tensor) -> torch.Tensor:
    wrong = leaf.clone()
    if leaf.dim():
        wrong[leaf.shape[0] - max(1, leaf.shape[0] // 8) :] = 0
    return wrong


def _last_column_forgotten(leaf: torch.Tensor) -> torch.Tensor:
    wrong = leaf.clone()
    if leaf.dim():
        wrong[..., -1] = 0
    return wrong


_OUTPUT_MUTANTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "a constant": _constant,
    "first rows only": _first_rows,
    "last column left out": _last_column_forgotten,
}


def _copies(question: Question, right: Leaves) -> Iterator[tuple[str, Leaves]]:
    for draw, value in zip(question.case.inputs, question.inputs, strict=True):
        fits = [value.shape == leaf.shape and value.dtype == leaf.dtype for leaf in right]
        if any(fits):
            yield f"a copy of {draw.name}", tuple(value if fit else leaf for fit, leaf in zip(fits, right, strict=True))


def _blind(oracle: Oracle, question: Question) -> Iterator[tuple[str, Leaves]]:
    """Answers for other inputs: all activations drawn anew, and the last column of the first activation ignored."""
    case = question.case
    fresh = oracle.draw(case)
    yield "the answer for other inputs", oracle.original(fresh, case.constants)
    for index, draw in enumerate(case.inputs):
        value = question.inputs[index]
        if draw.role is Role.ACTIVATION and value.is_floating_point() and value.dim() and value.shape[-1] > 1:
            shortened = value.clone()
            shortened[..., -1] = 0
            inputs = [*question.inputs[:index], shortened, *question.inputs[index + 1 :]]
            wrong = oracle.original(inputs, case.constants)
            if any(not torch.equal(a, leaf.original) for a, leaf in zip(wrong, question.expected, strict=True)):
                yield (
                    f"the last column of {draw.name} ignored",
                    wrong,
                )  # else the op ignores it too, as strided pools do


def _precision(oracle: Oracle, question: Question, survivors: dict[str, bool]) -> list[str]:
    """Half-precision arithmetic in a float32 op: truth of inputs rounded to bfloat16 and float16."""
    case = question.case
    if case.dtype != "float32":
        return [f"half-precision mutant not applicable to {case.dtype}"]
    for kind in (torch.bfloat16, torch.float16):
        rounded = [_through(value, kind) for value in question.inputs]
        wrong = oracle.expect(case, rounded)
        key = f"{str(kind).removeprefix('torch.')} arithmetic"
        if not _twice_as_wrong(wrong, question.expected):
            return [f"{key}: not applicable, the original is as imprecise on {case.name}"]
        leaves = tuple(leaf.truth.to(leaf.original.dtype) for leaf in wrong)
        caught = compare_all(leaves, question.expected) is not None
        survivors[key] = survivors.get(key, True) and not caught
    return []


def _through(value: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return value.to(kind).to(value.dtype) if value.is_floating_point() else value


def _twice_as_wrong(wrong: Sequence[Expected], expected: Sequence[Expected]) -> bool:
    """Whether the original is more than twice as precise as the mutant, on some leaf."""
    return any(
        _distance(mutant.truth, leaf.truth) > TWICE * _distance(widened(leaf.original), leaf.truth)
        for mutant, leaf in zip(wrong, expected, strict=True)
        if leaf.original.is_floating_point()
    )


def _distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).abs().square().nan_to_num().sum().sqrt().item())

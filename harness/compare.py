"""The yardstick: is a candidate's output as right as the original op, row block by row block?

A block passes when its largest and its root-mean-square error against float64 are at most twice the larger of the
original op's own error and the rounding of an honest serial accumulation (harness/truth.py), plus a few ulp of the
block's scale; the whole leaf must meet the root-mean-square (relative Frobenius) bound as well. Non-finite elements
must be those of truth cast to the output dtype, or of the original. Pure: tensors in, a sentence or None out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.truth import Leaves, widened

ALLOWED_RATIO = 2.0
"""A candidate's error may be this many times the yardstick (design §5)."""
NOISE_MARGIN = 4.0
"""The worst element of a leaf may be this many times as far off as the few simulated serial accumulations were.

They are draws, and so is a candidate: in attention one score moves a whole row, and honest float32 kernels were seen
up to 2.9 times beyond three draws. TF32 products lie some hundred times beyond (tests/test_compare.py).
"""
MAX_ULPS = {torch.float16: 2.0, torch.bfloat16: 2.0}
MAX_ULPS_WIDE = 4.0
"""Ulps of a block's scale for its largest error; fewer in half types, where rounding the result is all there is."""
RMS_ULPS = {torch.float16: 0.5, torch.bfloat16: 0.5}
RMS_ULPS_WIDE = 2.0
NOISE_SIGMAS = 3.0
MIN_BLOCK_ELEMENTS = 32
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Expected:
    """What one output leaf is measured against; all tensors have its shape, `truth` and `noisy` are float64."""

    truth: torch.Tensor
    original: torch.Tensor
    noisy: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Mismatch:
    """Why an output leaf is refused. `ratio` is error ÷ tolerance at the worst place (inf for a pattern)."""

    reason: str
    ratio: float = math.inf


def expectations(truth: Leaves, own: Leaves, noisy: Sequence[Leaves]) -> tuple[Expected, ...]:
    """Zip the three evaluations of a reference, leaf by leaf."""
    return tuple(
        Expected(true_leaf, own_leaf, tuple(run[index] for run in noisy))
        for index, (true_leaf, own_leaf) in enumerate(zip(truth, own, strict=True))
    )


def compare_all(outputs: Leaves, expected: Sequence[Expected], *, exact: bool = False) -> Mismatch | None:
    """The first leaf that is wrong, named by its number; None when every leaf is right."""
    if not expected or len(outputs) != len(expected):
        return Mismatch(f"{len(outputs)} outputs where {len(expected)} were expected")
    for index, (output, leaf) in enumerate(zip(outputs, expected, strict=True)):
        mismatch = compare(output, leaf, exact=exact)
        if mismatch is not None:
            where = f"output {index}: " if len(expected) > 1 else ""
            return Mismatch(where + mismatch.reason, mismatch.ratio)
    return None


def compare(output: torch.Tensor, expected: Expected, *, exact: bool = False) -> Mismatch | None:
    """One leaf against its expectation; shapes and dtypes must be equal."""
    own = expected.original
    if output.shape != own.shape or output.dtype != own.dtype:
        return Mismatch(f"{output.dtype} {tuple(output.shape)} where {own.dtype} {tuple(own.shape)} was expected")
    if output.numel() == 0:
        return None
    if output.is_complex():
        parts = (expected.truth, own, *expected.noisy)
        truth, own_part, *noisy = (torch.view_as_real(part.resolve_conj()) for part in parts)
        return compare(torch.view_as_real(output.resolve_conj()), Expected(truth, own_part, tuple(noisy)), exact=exact)
    if not output.is_floating_point():
        return _compare_integers(output, expected)
    return _compare_floats(output, expected, exact=exact)


ROUGH = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-4}
ROUGH_WIDE = 2.0**-9
ROUGH_INTEGERS = 0.01


def roughly_equal(outputs: Leaves, own: Leaves) -> bool:
    """Whether each leaf lies within a small share of the original's largest value: cheap, blind to precision.

    Tells an answer from none, from an old one and from one for other inputs.
    """
    return len(outputs) == len(own) and all(_roughly(output, leaf) for output, leaf in zip(outputs, own, strict=True))


def _roughly(output: torch.Tensor, own: torch.Tensor) -> bool:
    if output.shape != own.shape or output.dtype != own.dtype:
        return False
    if not own.numel():
        return True
    if own.is_complex():
        return _roughly(torch.view_as_real(output.resolve_conj()), torch.view_as_real(own.resolve_conj()))
    if not own.is_floating_point():
        return float((output != own).double().mean()) <= ROUGH_INTEGERS
    wanted, got = own.float(), output.float()
    scale = wanted[wanted.isfinite()].abs().amax() if bool(wanted.isfinite().any()) else wanted.new_zeros(())
    close = (got - wanted).abs() <= ROUGH.get(own.dtype, ROUGH_WIDE) * scale
    return bool((close | (got == wanted) | (got.isnan() & wanted.isnan())).all())


def _compare_integers(output: torch.Tensor, expected: Expected) -> Mismatch | None:
    """Integers follow the original; where its noisy twins disagree (a tie), any of their answers will do."""
    allowed = output == expected.original
    for other in (expected.truth, *expected.noisy):
        allowed |= output == other
    wrong = int((~allowed).sum().item())
    return Mismatch(f"{wrong} of {output.numel()} {output.dtype} elements differ") if wrong else None


@dataclass(frozen=True)
class _Rows:
    """Per-row statistics of one chunk or a whole leaf (1-D float64 tensors)."""

    error: torch.Tensor
    error_square: torch.Tensor
    yard: torch.Tensor
    yard_square: torch.Tensor
    noise_square: torch.Tensor
    scale: torch.Tensor
    scale_square: torch.Tensor

    def columns(self) -> tuple[torch.Tensor, ...]:
        return (
            self.error,
            self.error_square,
            self.yard,
            self.yard_square,
            self.noise_square,
            self.scale,
            self.scale_square,
        )


def _compare_floats(output: torch.Tensor, expected: Expected, *, exact: bool) -> Mismatch | None:
    width = output.shape[-1] if output.dim() > 1 else 1
    found: list[_Rows] = []
    for piece, part in _chunks(output, expected, width):
        wrong = _wrong_pattern(piece, part)
        if wrong is not None:
            return wrong
        rounded = part.truth.to(piece.dtype)  # the sum is exact, its storage need not be: 257 in bfloat16
        if exact and not torch.equal(torch.nan_to_num(piece), torch.nan_to_num(rounded)):
            return Mismatch("not exact on small integers, where every partial sum is representable")
        found.append(_row_statistics(piece, part))
    rows = _Rows(*(torch.cat(column) for column in zip(*(part.columns() for part in found), strict=True)))
    return _judge_rows(rows, width, output.dtype)


def _chunks(output: torch.Tensor, expected: Expected, width: int) -> Iterator[tuple[torch.Tensor, Expected]]:
    """Whole rows, at most CHUNK_ELEMENTS at a time, so that large outputs need little memory."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, width)

    flat = Expected(rows(expected.truth), rows(expected.original), tuple(rows(item) for item in expected.noisy))
    step = max(1, CHUNK_ELEMENTS // width)
    pieces = rows(output)
    for start in range(0, pieces.shape[0], step):
        cut = slice(start, start + step)
        yield pieces[cut], Expected(flat.truth[cut], flat.original[cut], tuple(item[cut] for item in flat.noisy))


def _wrong_pattern(output: torch.Tensor, expected: Expected) -> Mismatch | None:
    """NaN, +inf and -inf may stand only where truth in this dtype, or the original, has the same."""
    cast = expected.truth.to(output.dtype)
    if bool((output.isfinite() & cast.isfinite()).all().item()):
        return None
    own = expected.original
    checks: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.isnan, torch.isposinf, torch.isneginf)
    same_truth = torch.ones_like(output, dtype=torch.bool)
    same_own = torch.ones_like(output, dtype=torch.bool)
    for check in checks:
        is_so = check(output)
        same_truth &= is_so == check(cast)
        same_own &= is_so == check(own)
    wrong = int((~(same_truth | same_own)).sum().item())
    if not wrong:
        return None
    found = int((~output.isfinite()).sum().item())
    wanted = int((~cast.isfinite()).sum().item())
    return Mismatch(f"{wrong} elements are finite or not where the original is the other ({found} against {wanted})")


def _row_statistics(output: torch.Tensor, expected: Expected) -> _Rows:
    got = widened(output)
    truth = torch.where(expected.truth.isfinite(), expected.truth, widened(expected.original))
    counted = got.isfinite() & truth.isfinite()
    truth = torch.where(counted, truth, 0.0)
    error = torch.where(counted, got - truth, 0.0).abs()
    own = torch.where(counted, widened(expected.original) - truth, 0.0).abs()
    own = torch.where(own.isfinite(), own, 0.0)
    noise = _noise_size(expected.noisy, truth, counted)
    scale = truth.abs()
    return _Rows(
        error.amax(1),
        error.square().sum(1),
        torch.maximum(own, NOISE_MARGIN * noise).amax(1),
        own.square().sum(1),
        _noise_in_rows(expected.noisy, truth, counted),
        scale.amax(1),
        scale.square().sum(1),
    )


def _noise_size(noisy: Sequence[torch.Tensor], truth: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """√3 times the root mean square over the noise draws: a single draw may be small by chance."""
    total = torch.zeros_like(truth)
    for run in noisy:
        moved = torch.where(counted, run - truth, 0.0).square()
        total += torch.where(moved.isfinite(), moved, 0.0)
    return (total * (NOISE_SIGMAS / max(len(noisy), 1))).sqrt()


def _noise_in_rows(noisy: Sequence[torch.Tensor], truth: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Three times the squared noise of each row in the draw that moved it most.

    Where one error moves a whole row (attention between two keys of nearly equal score) the draws differ much, and an
    honest kernel may be as unlucky as any of them; where many errors meet, they agree.
    """
    largest = torch.zeros_like(truth[:, 0]) if truth.shape[1] else truth.sum(1)
    for run in noisy:
        moved = torch.where(counted, run - truth, 0.0).square()
        largest = torch.maximum(largest, torch.where(moved.isfinite(), moved, 0.0).sum(1))
    return largest * NOISE_SIGMAS


def _judge_rows(rows: _Rows, width: int, dtype: torch.dtype) -> Mismatch | None:
    group = max(1, -(-MIN_BLOCK_ELEMENTS // width))
    limits = torch.finfo(dtype)
    tiny = limits.smallest_normal * limits.eps if dtype is torch.float16 else limits.smallest_normal
    max_slack = MAX_ULPS.get(dtype, MAX_ULPS_WIDE) * limits.eps
    rms_slack = RMS_ULPS.get(dtype, RMS_ULPS_WIDE) * limits.eps

    error, yard, scale = (_grouped(column, group).amax(1) for column in (rows.error, rows.yard, rows.scale))
    worst = _worst(error / (ALLOWED_RATIO * yard + max_slack * scale + tiny))
    if worst.ratio > 1:
        return Mismatch(_said("largest error", worst, group, error), worst.ratio)

    squares = (rows.error_square, rows.yard_square, rows.noise_square, rows.scale_square)
    sums = [_grouped(column, group).sum(1) for column in squares]
    for label, parts in (("root-mean-square error", sums), ("Frobenius error", [part.sum()[None] for part in sums])):
        error, own, noise, scale = (part.sqrt() for part in parts)
        allowed = ALLOWED_RATIO * torch.maximum(own, noise) + rms_slack * scale
        worst = _worst(error / (allowed + tiny * math.sqrt(width * group)))
        if worst.ratio > 1:
            return Mismatch(_said(label, worst, group, error), worst.ratio)
    return None


@dataclass(frozen=True)
class _Worst:
    index: int
    ratio: float


def _worst(ratios: torch.Tensor) -> _Worst:
    index = int(ratios.argmax().item())
    ratio = float(ratios[index].item())
    return _Worst(index, math.inf if math.isnan(ratio) else ratio)


def _grouped(column: torch.Tensor, group: int) -> torch.Tensor:
    missing = -len(column) % group
    return torch.nn.functional.pad(column, (0, missing)).view(-1, group)


def _said(label: str, worst: _Worst, group: int, error: torch.Tensor) -> str:
    """The sentence names no tolerance: it is read by whoever writes the next candidate."""
    first = worst.index * group
    rows = f"row {first}" if group == 1 else f"rows {first} to {first + group - 1}"
    where = "over the whole output" if label.startswith("Frobenius") else f"in {rows}"
    return f"{label} {float(error[worst.index]):.3g} {where} is {worst.ratio:.3g} times what is allowed"

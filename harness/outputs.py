"""Whole-model inputs and outputs: flattened to leaves, copied as they lie in memory, drawn afresh, compared.

Any nesting is flattened: tuples, dicts, dataclasses (a ModelOutput is one), and objects that hold tensors in their
attributes (caches). Tensors that an object hides elsewhere are not seen.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

MAX_DEPTH = 12
ULPS_OF_SCALE = {torch.float16: 2, torch.bfloat16: 2}  # on the largest error; half of it on the Frobenius error
ULPS_OF_SCALE_FLOAT = 4
FEW = 12.0  # of a handful of numbers the original's may be right by luck; among 12 the slack is still doubled
ORIGINAL_FACTOR = 2.0  # our error against float64 may be twice the original's
TRUST: Mapping[torch.dtype, float] = {torch.float16: 2e-2, torch.bfloat16: 6e-2}  # relative Frobenius, whole models
TRUST_FLOAT = 5e-4

Leaf = tuple[str, Any]


@dataclass(frozen=True)
class Difference:
    """How far one run is from the original: `ok`, the largest absolute difference, and the first offence in words."""

    ok: bool
    max_error: float
    detail: str = ""


def leaves(value: Any, path: str = "output", depth: int = 0) -> Iterator[Leaf]:
    """Tensors and plain values with a readable path each, in a fixed order."""
    if depth > MAX_DEPTH or isinstance(value, torch.Tensor | str | bytes | int | float | complex | None):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in (field.name for field in dataclasses.fields(value)):
            yield from leaves(getattr(value, name), f"{path}.{name}", depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, item in vars(value).items():
            yield from leaves(item, f"{path}.{name}", depth + 1)
    else:
        yield path, type(value).__name__


def like_original(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, in storage of its own; overlapping (expanded) views stay overlapping."""
    with torch.no_grad():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = torch.empty(extent if tensor.numel() else 0, dtype=tensor.dtype, device=tensor.device)
        twin = flat.as_strided(tensor.shape, tensor.stride())
        source = tensor.detach()
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[axis] > 1:
                twin_part, source = twin.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
                twin = twin_part
        twin.copy_(source)
        return flat.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def copied(inputs: Any) -> Any:
    """The same inputs in fresh memory: a model that writes to its inputs spoils only the copy."""
    return pytree.tree_map(
        lambda leaf: like_original(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), inputs
    )


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put the buffers' values back at the end."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def redrawn(inputs: Any, seed: int) -> Any:
    """Other values of the same shapes, strides and ranges: floats with the same mean and spread, ids within range.

    Integers that are only 0 and 1, and booleans, are masks: they stay, because a random mask may hide a whole row.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        twin = like_original(leaf)
        if not leaf.numel() or leaf.dtype is torch.bool or any(s == 0 for s in leaf.stride()):
            return twin
        with torch.no_grad():
            twin.copy_(_values_like(leaf, generator))
        return twin

    return pytree.tree_map(draw, inputs)


def _values_like(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(
            _values_like(torch.view_as_real(leaf.detach().resolve_conj()), generator).contiguous()
        )
    if leaf.is_floating_point():
        wide = leaf.detach().double()
        spread = float(wide.std()) if leaf.numel() > 1 else 0.0
        if not bool(wide.isfinite().all()) or spread == 0.0:
            return leaf.detach()  # a float mask, or a constant
        noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        return (noise * spread + float(wide.mean())).clamp(float(wide.min()), float(wide.max())).to(leaf.dtype)
    low, high = int(leaf.min()), int(leaf.max())
    if low >= 0 and high <= 1:
        return leaf.detach()
    return torch.randint(low, high + 1, leaf.shape, generator=generator).to(leaf.dtype)


def compare(ours: Sequence[Leaf], original: Sequence[Leaf], truth: Sequence[Leaf] | None) -> Difference:
    """Every leaf against the original, judged by float64 `truth` where there is one.

    A floating leaf passes when its largest and its Frobenius error against truth are at most ORIGINAL_FACTOR times
    the original's, plus a few units of the last place of the leaf's scale; without truth, or where truth strays from
    the original by more than its dtype explains, it must agree with the original to TRUST. Other leaves must be equal.
    """
    if [path for path, _ in ours] != [path for path, _ in original]:
        return Difference(ok=False, max_error=float("inf"), detail="the outputs have another structure")
    true_leaves = dict(truth or ())
    found = [
        _leaf(path, mine, theirs, true_leaves.get(path))
        for (path, mine), (_, theirs) in zip(ours, original, strict=True)
    ]
    worst = max((difference.max_error for difference in found), default=0.0)
    failed = next((difference for difference in found if not difference.ok), None)
    return Difference(ok=failed is None, max_error=worst, detail=failed.detail if failed else "")


def _leaf(path: str, mine: Any, theirs: Any, truth: Any) -> Difference:
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        same = type(mine) is type(theirs) and mine == theirs
        return Difference(same, 0.0 if same else float("inf"), "" if same else f"{path} is {mine!r}, not {theirs!r}")
    layout, wanted = (mine.shape, mine.dtype, mine.device), (theirs.shape, theirs.dtype, theirs.device)
    if layout != wanted:
        return Difference(ok=False, max_error=float("inf"), detail=f"{path} is {layout}, not {wanted}")
    if not (mine.is_floating_point() or mine.is_complex()):
        unequal = int((mine != theirs).sum())
        return Difference(
            not unequal, float(unequal > 0), f"{path}: {unequal} of {mine.numel()} values differ" if unequal else ""
        )
    return _floating(path, mine.detach(), theirs.detach(), truth if isinstance(truth, torch.Tensor) else None)


def _floating(path: str, mine: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor | None) -> Difference:
    ours, base = _real64(mine), _real64(theirs)
    finite = base.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not _same_non_finite(ours, base):
        return Difference(ok=False, max_error=float("inf"), detail=f"{path}: inf or nan stand elsewhere")
    ours, base = ours[finite], base[finite]
    if not base.numel():
        return Difference(ok=True, max_error=0.0)
    gap = float((ours - base).abs().max())
    slack = ULPS_OF_SCALE.get(theirs.dtype, ULPS_OF_SCALE_FLOAT) * torch.finfo(theirs.dtype).eps
    if theirs.dtype not in ULPS_OF_SCALE:
        slack *= 1.0 + FEW / base.numel()
    limit = TRUST.get(theirs.dtype, TRUST_FLOAT)
    true = _real64(truth)[finite] if truth is not None and truth.shape == theirs.shape else None
    if true is None or not bool(true.isfinite().all()) or _relative(base, true) > limit:
        error = _relative(ours, base)
        ok = error <= limit
        return Difference(
            ok, gap, "" if ok else f"{path}: relative error {error:.2e} against eager, allowed {limit:.0e}"
        )
    return _against_truth(path, ours, base, true, slack, gap)


def _against_truth(
    path: str, ours: torch.Tensor, base: torch.Tensor, true: torch.Tensor, slack: float, gap: float
) -> Difference:
    scale = float(true.abs().max())
    allowed = ORIGINAL_FACTOR * float((base - true).abs().max()) + slack * scale
    error = float((ours - true).abs().max())
    allowed_norm = ORIGINAL_FACTOR * _relative(base, true) + slack / 2
    norm = _relative(ours, true)
    if error > allowed:
        return Difference(
            ok=False, max_error=gap, detail=f"{path}: error {error:.2e} against float64, allowed {allowed:.2e}"
        )
    if norm > allowed_norm:
        return Difference(
            ok=False,
            max_error=gap,
            detail=f"{path}: relative error {norm:.2e} against float64, allowed {allowed_norm:.2e}",
        )
    return Difference(ok=True, max_error=gap)


def _real64(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _same_non_finite(ours: torch.Tensor, base: torch.Tensor) -> bool:
    return torch.equal(ours.isnan(), base.isnan()) and torch.equal(ours == float("inf"), base == float("inf"))


def _relative(value: torch.Tensor, true: torch.Tensor) -> float:
    """‖value - true‖ / ‖true‖, Frobenius."""
    return float((value - true).norm() / true.norm().clamp_min(torch.finfo(torch.float64).tiny))

"""Values that nobody has seen, at the speed of a copy: input sets of the timed runs made from a few drawn ones.

Each set is a drawn one, rotated and multiplied, element by element, by a stretch of a secret table: no sum, norm or
product of the drawn values says anything about those of the new ones, so nothing can be kept from one run to the next.
A set follows from its key alone, so it can be made again when an output is examined, after its memory was reused.
"""

import hashlib
from collections.abc import Sequence

import torch

TABLE_ROOM = 1 << 16
"""How many places there are where a stretch of the table may begin."""
LEAST = 0.75
"""Factors lie in [LEAST, 1]: bounds that hold for the drawn values hold for the new ones."""


class FreshValues:
    """Fills input sets from `bases`, drawn sets of one case; arguments at the `fixed` places keep what they hold."""

    def __init__(self, bases: Sequence[Sequence[torch.Tensor]], fixed: Sequence[int] = ()) -> None:
        self._bases, self._fixed = bases, frozenset(fixed)
        self._tables = [_table(value) for value in bases[0]]

    def fill(self, targets: Sequence[torch.Tensor], key: int, places: Sequence[int]) -> None:
        """New contents for the arguments at `places`; the same for the same key."""
        base = self._bases[_number(key, "set") % len(self._bases)]
        for place in set(places) - self._fixed:
            factors = self._factors(place, _number(key, f"factors {place}"))
            _rotated(targets[place], base[place], factors, _number(key, f"rows {place}"))

    def again(self, key: int) -> tuple[torch.Tensor, ...]:
        """The set of this key in memory of its own, laid out as its bases are."""
        made = tuple(torch.empty_like(value, memory_format=torch.preserve_format) for value in self._bases[0])
        targets = tuple(_like(value, fresh) for value, fresh in zip(self._bases[0], made, strict=True))
        self.fill(targets, key, range(len(targets)))
        for place in self._fixed:
            _once(targets[place]).copy_(_once(self._bases[0][place]))
        return targets

    def _factors(self, place: int, number: int) -> torch.Tensor | None:
        table = self._tables[place]
        if table is None:
            return None
        start = number % TABLE_ROOM
        value = _once(self._bases[0][place])
        return table[start : start + value.numel()].view(value.shape)


def _like(value: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """`fresh`, or memory with the strides of `value` where torch does not keep them (gaps, expanded rows)."""
    if fresh.stride() == value.stride():
        return fresh
    steps = zip(value.shape, value.stride(), strict=True)
    count = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
    return torch.zeros(count, dtype=value.dtype, device=value.device).as_strided(value.shape, value.stride())


def _table(value: torch.Tensor) -> torch.Tensor | None:
    if not value.is_floating_point():
        return None
    count = _once(value).numel() + TABLE_ROOM
    kind = torch.float32 if value.dtype is torch.float64 else value.dtype
    return torch.empty(count, dtype=kind, device=value.device).uniform_(LEAST, 1.0)


def _once(value: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of expanded dims."""
    for axis in range(value.dim()):
        if value.stride(axis) == 0 and value.shape[axis] > 1:
            value = value.narrow(axis, 0, 1)
    return value


def _rotated(target: torch.Tensor, base: torch.Tensor, factors: torch.Tensor | None, number: int) -> None:
    """Write `base` into `target`, rotated along its longest leading dim, times `factors`."""
    target, base = _once(target), _once(base)
    leading = list(range(max(1, target.dim() - 1))) if target.dim() else []
    axis = max(leading, key=lambda dim: target.shape[dim], default=-1)
    size = target.shape[axis] if leading else 0
    if size < 2:
        _write(target, base, factors)
        return
    shift = 1 + number % (size - 1)
    for begin, start, count in ((0, size - shift, shift), (shift, 0, size - shift)):
        part = None if factors is None else factors.narrow(axis, begin, count)
        _write(target.narrow(axis, begin, count), base.narrow(axis, start, count), part)


def _write(target: torch.Tensor, value: torch.Tensor, factors: torch.Tensor | None) -> None:
    if factors is None:
        target.copy_(value)
    else:
        torch.mul(value, factors, out=target)


def _number(key: int, what: str) -> int:
    """Some 64 bits that follow from a key and a purpose; much quicker than seeding a generator."""
    return int.from_bytes(hashlib.blake2b(f"{key} {what}".encode(), digest_size=8).digest(), "little")

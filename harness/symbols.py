"""Finds which numbers of a region vary with batch and sequence, by comparing its patterns at several sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

Values = tuple[int, ...]


@dataclass(frozen=True)
class Symbols:
    """The symbols of one region: the values of each at every captured size, and where to read it (input, dimension)."""

    values: Mapping[str, Values]
    places: Mapping[str, tuple[int, int]]
    dims: tuple[tuple[int | str, ...], ...]  # of the inputs, as names or fixed sizes

    def bindings(self) -> tuple[dict[str, int], ...]:
        """The symbols' sizes at each captured size, the captured run's first, without repetition."""
        count = max((len(values) for values in self.values.values()), default=1)
        every = [{name: values[index] for name, values in self.values.items()} for index in range(count)]
        return tuple(binding for index, binding in enumerate(every) if binding not in every[:index])


def symbolise(patterns: Sequence[Any], known: Mapping[str, Values]) -> tuple[Any, Symbols] | None:
    """One pattern for several sizes, numbers that vary written as "=256*S"; None when one cannot be written so.

    `known` holds the batch ("B") and sequence ("S") sizes over the same captures.
    """
    values: dict[str, Values] = {}
    places: dict[str, tuple[int, int]] = {}
    inputs = [pattern["inputs"] for pattern in patterns]
    if len({tuple(len(tensor[1]) for tensor in item) for item in inputs}) != 1:
        return None  # another number of inputs, or inputs of another rank
    varying = [
        (place, dim, sizes)
        for place, tensors in enumerate(zip(*inputs, strict=True))
        for dim, sizes in enumerate(zip(*(tensor[1] for tensor in tensors), strict=True))
        if len(set(sizes)) > 1
    ]
    for place, dim, sizes in varying:
        name = next((name for name, wanted in known.items() if wanted == sizes), None)
        if name is not None and name not in values:
            values[name], places[name] = sizes, (place, dim)
    basic = dict(values)
    for place, dim, sizes in varying:
        if sizes not in values.values():
            name = _composite_name(sizes, known, len(values))
            values[name], places[name] = sizes, (place, dim)
            if express(sizes, basic) is None:
                basic[name] = sizes
    merged = _merge(list(patterns), basic)
    if merged is _FAILED:
        return None
    names = {sizes: name for name, sizes in values.items()}
    dims = tuple(
        tuple(
            sizes[0] if len(set(sizes)) == 1 else names[sizes] for sizes in zip(*(t[1] for t in tensors), strict=True)
        )
        for tensors in zip(*inputs, strict=True)
    )
    return merged, Symbols(values, places, dims)


def _composite_name(sizes: Values, known: Mapping[str, Values], index: int) -> str:
    expression = express(sizes, known)
    if expression is None:
        return f"N{index}"
    factors = expression[1:].split("*")
    return "".join(factors[1:] + factors[:1]) if factors[0].isdigit() else "".join(factors)


def express(numbers: Sequence[int | None], symbols: Mapping[str, Values]) -> str | None:
    """Numbers over the captured sizes as a coefficient times at most two symbols, or None. None entries are free."""
    for count in (1, 2):
        for names in combinations_with_replacement(symbols, count):
            coefficient = _coefficient(numbers, [symbols[name] for name in names])
            if coefficient is not None:
                head = [] if coefficient == 1 else [str(coefficient)]
                return "=" + "*".join([*head, *names])
    return None


def _coefficient(numbers: Sequence[int | None], factors: Sequence[Values]) -> int | None:
    found: set[int] = set()
    for index, number in enumerate(numbers):
        if number is None:
            continue
        product = 1
        for values in factors:
            product *= values[index]
        if product == 0 or number % product:
            return None
        found.add(number // product)
    return found.pop() if len(found) == 1 and 0 not in found else None


_FAILED = object()


def _merge(items: list[Any], symbols: Mapping[str, Values]) -> Any:
    first = items[0]
    if isinstance(first, dict):
        if any(not isinstance(item, dict) or item.keys() != first.keys() for item in items):
            return _FAILED
        return _all({key: _merge([item[key] for item in items], symbols) for key in first})
    if isinstance(first, list):
        if any(not isinstance(item, list) or len(item) != len(first) for item in items):
            return _FAILED
        parts = [_merge(list(parts), symbols) for parts in zip(*items, strict=True)]
        return _FAILED if any(part is _FAILED for part in parts) else parts
    if all(type(item) is type(first) and item == first for item in items):
        return first
    return _varying(items, symbols)


def _all(parts: dict[str, Any]) -> Any:
    return _FAILED if any(part is _FAILED for part in parts.values()) else parts


def _varying(items: list[Any], symbols: Mapping[str, Values]) -> Any:
    """A number that differs between sizes; a stride that is unknown where its dimension has size one."""
    if any(isinstance(item, bool) or not isinstance(item, (int, type(None))) for item in items):
        return _FAILED
    known = {item for item in items if item is not None}
    if len(known) == 1 and None in items:
        return known.pop()
    expression = express(items, symbols)
    return _FAILED if expression is None else expression

"""The fuser's values: what each operation of a region computes, over axes instead of shapes."""

from dataclasses import dataclass, field
from typing import Any

from agent.proposers.playbook.sizes import Axes, Group, Unsupported

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32")
TRANSCENDENTAL = frozenset({"exp", "power", "tanh", "erf", "sigmoid", "log", "sin", "cos", "pow"})


@dataclass(eq=False)
class Value:
    """One scalar function of the axes in `dims`.

    `op` is "load" (payload: input index), "literal" (a Python number), "constant" (the target's constant by name),
    "size" (a Size as a number), "reduce" (Reduction), "pick" (Pick), "join" (Join), "pass" (the argument under other
    dims), "cast" (rounds to `dtype`) or the name of a pointwise operation.
    """

    op: str
    args: tuple["Value", ...]
    dims: tuple[Group, ...]
    dtype: str
    payload: Any = None
    name: str = ""


@dataclass(frozen=True)
class Reduction:
    """Combine over all axes of `group`: kind is "sum", "max" or "min"; `exact_nan` lets a NaN through a max or min."""

    kind: str
    group: Group
    exact_nan: bool = True


@dataclass(frozen=True)
class Pick:
    """Read coordinate start + step × c of the static axis `source`, c being the coordinate of `axis` (None: one)."""

    source: int
    axis: int | None
    start: int
    step: int = 1


@dataclass(frozen=True)
class Piece:
    """One argument of a concatenation: coordinates [start, start + count) come from `source` (None: a single one)."""

    source: int | None
    start: int
    count: int


@dataclass(frozen=True)
class Join:
    """A concatenation along the static axis `axis`; pieces in the order of the value's arguments."""

    axis: int
    pieces: tuple[Piece, ...]


Coordinates = dict[int, int]


def read_coordinate(axes: Axes, axis: int, coordinates: Coordinates) -> int:
    """The coordinate of a static axis that may have been split since."""
    total = 0
    for leaf in axes.leaves((axis,)):
        total = total * axes.size(leaf).factor + coordinates[leaf]
    return total


def write_coordinate(axes: Axes, axis: int, value: int, coordinates: Coordinates) -> Coordinates:
    """The coordinates with that of a static axis set."""
    changed = dict(coordinates)
    for leaf in reversed(axes.leaves((axis,))):
        size = axes.size(leaf).factor
        changed[leaf] = value % size
        value //= size
    return changed


def redirect(axes: Axes, value: Value, coordinates: Coordinates) -> tuple[Value, Coordinates]:
    """Follow picks and joins: the value that is really read, and where."""
    while value.op in ("pick", "join", "pass"):
        if value.op == "pass":
            value = value.args[0]
        elif value.op == "pick":
            pick: Pick = value.payload
            place = pick.start
            if pick.axis is not None:
                place += pick.step * read_coordinate(axes, pick.axis, coordinates)
            value, coordinates = value.args[0], write_coordinate(axes, pick.source, place, coordinates)
        else:
            value, coordinates = _piece(axes, value, coordinates)
    return value, coordinates


def _piece(axes: Axes, value: Value, coordinates: Coordinates) -> tuple[Value, Coordinates]:
    join: Join = value.payload
    place = read_coordinate(axes, join.axis, coordinates)
    for argument, piece in zip(value.args, join.pieces, strict=True):
        if piece.start <= place < piece.start + piece.count:
            if piece.source is None:
                return argument, coordinates
            return argument, write_coordinate(axes, piece.source, place - piece.start, coordinates)
    raise Unsupported("a concatenation does not cover its axis")


@dataclass
class Region:
    """A traced region: its axes, inputs as loads, and outputs."""

    axes: Axes
    loads: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def leaves(self, value: Value) -> tuple[int, ...]:
        """All leaf axes of a value, dimension by dimension."""
        return tuple(leaf for group in value.dims for leaf in self.axes.leaves(group))

    def loops(self, value: Value) -> frozenset[int]:
        """The axes that are loops, not unrolled."""
        return frozenset(leaf for leaf in self.leaves(value) if not self.axes.is_static(leaf))

    def statics(self, value: Value) -> tuple[int, ...]:
        """The unrolled axes of a value."""
        return tuple(leaf for leaf in self.leaves(value) if self.axes.is_static(leaf))


def reachable(roots: list[Value]) -> list[Value]:
    """Every value that the roots need, arguments first."""
    seen: dict[int, Value] = {}

    def visit(value: Value) -> None:
        if id(value) in seen:
            return
        for argument in value.args:
            visit(argument)
        seen[id(value)] = value

    for root in roots:
        visit(root)
    return list(seen.values())

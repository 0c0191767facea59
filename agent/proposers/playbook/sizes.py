"""Symbolic tensor sizes and the iteration axes that a region's dimensions share: pure bookkeeping, no torch.

A dimension is a *group*: the axes it is made of, major first; an empty group is a dimension of size one. A reshape
regroups axes, a transpose permutes groups, broadcasting unifies them. What this cannot say (sums of symbols, a
diagonal) raises Unsupported, and the region is left to other routes.
"""

import math
from dataclasses import dataclass

Group = tuple[int, ...]


class Unsupported(Exception):  # noqa: N818 - not an error: this route has no answer for the region
    """The fuser has no code for this region; the message says why."""


@dataclass(frozen=True)
class Size:
    """A product: an integer factor times named symbols, e.g. 4*B*S."""

    factor: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: "Size") -> "Size":
        return Size(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other: "Size") -> "Size | None":
        """The exact quotient, or None when there is none."""
        if other.factor == 0 or self.factor % other.factor:
            return None
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return None
            left.remove(symbol)
        return Size(self.factor // other.factor, tuple(left))

    @property
    def constant(self) -> int | None:
        """The number, when no symbol is in it."""
        return None if self.symbols else self.factor

    @property
    def text(self) -> str:
        """C and Python source."""
        if not self.symbols:
            return str(self.factor)
        names = " * ".join(self.symbols)
        return names if self.factor == 1 else f"{names} * {self.factor}"

    def at(self, values: dict[str, int]) -> int:
        """The number, given the symbols' values."""
        return self.factor * math.prod(values[symbol] for symbol in self.symbols)


ONE = Size(1)


def product(sizes: "list[Size] | tuple[Size, ...]") -> Size:
    """The product of sizes; one when there are none."""
    total = ONE
    for size in sizes:
        total = total * size
    return total


class Axes:
    """All axes of one region. Unifying or splitting an axis acts everywhere it occurs."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []
        self._becomes: dict[int, Group] = {}
        self._static: set[int] = set()

    def new(self, size: Size, *, static: bool = False) -> int:
        """A fresh axis; a static one is unrolled in the generated code."""
        self._sizes.append(size)
        axis = len(self._sizes) - 1
        if static:
            self._static.add(axis)
        return axis

    def group(self, size: Size) -> Group:
        """A fresh one-axis group, or the empty one for size 1."""
        return () if size == ONE else (self.new(size),)

    def leaves(self, group: Group) -> Group:
        """The axes that a group consists of now."""
        found: list[int] = []
        for axis in group:
            found.extend(self.leaves(self._becomes[axis]) if axis in self._becomes else (axis,))
        return tuple(found)

    def size(self, axis: int) -> Size:
        """The size of one axis."""
        return self._sizes[axis]

    def extent(self, group: Group) -> Size:
        """The size of a dimension."""
        return product([self._sizes[axis] for axis in group])

    def is_static(self, axis: int) -> bool:
        """Whether the axis is unrolled."""
        return axis in self._static

    def make_static(self, axis: int) -> None:
        """Unroll this axis; it must be constant and short."""
        constant = self._sizes[axis].constant
        if constant is None or constant > 8:
            raise Unsupported(f"an axis of size {self._sizes[axis].text} cannot be unrolled")
        self._static.add(axis)

    def split(self, axis: int, minor: Size) -> tuple[Group, Group]:
        """Split a leaf in two; the major part comes first. A part of size one is an empty group."""
        major = self._sizes[axis].over(minor)
        if major is None:
            raise Unsupported(f"size {self._sizes[axis].text} does not divide by {minor.text}")
        if major == ONE or minor == ONE:
            return ((axis,), ()) if minor == ONE else ((), (axis,))
        static = self.is_static(axis)
        parts = (self.new(major, static=static), self.new(minor, static=static))
        self._becomes[axis] = parts
        return (parts[0],), (parts[1],)

    def unify(self, first: Group, second: Group) -> None:
        """Declare two dimensions to be the same one."""
        a, b = list(self.leaves(first)), list(self.leaves(second))
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            if self._sizes[x] == self._sizes[y]:
                self._merge(x, y)
            elif self._sizes[x].over(self._sizes[y]) is not None:
                major, minor = self.split(x, self._sizes[y])
                self._merge(minor[0], y)
                a.extend(major)
            elif self._sizes[y].over(self._sizes[x]) is not None:
                major, minor = self.split(y, self._sizes[x])
                self._merge(x, minor[0])
                b.extend(major)
            else:
                common = math.gcd(self._sizes[x].factor, self._sizes[y].factor)
                if common == 1:
                    raise Unsupported(f"sizes {self._sizes[x].text} and {self._sizes[y].text} do not match")
                (major_x, minor_x), (major_y, minor_y) = self.split(x, Size(common)), self.split(y, Size(common))
                a.extend(major_x + minor_x)
                b.extend(major_y + minor_y)
        if a or b:
            raise Unsupported("two dimensions of different size meet")

    def _merge(self, first: int, second: int) -> None:
        if first == second:
            return
        if self.is_static(second):
            self._static.add(first)
        self._becomes[second] = (first,)

    def cut(self, group: Group, minor: Size) -> tuple[Group, Group]:
        """Cut a dimension into (major, minor), splitting an axis where the border falls inside one."""
        left, right = list(self.leaves(group)), list[int]()
        wanted = minor
        while wanted != ONE:
            if not left:
                raise Unsupported(f"a dimension cannot be cut at {minor.text}")
            axis = left.pop()
            rest = wanted.over(self._sizes[axis])
            if rest is not None:
                right.insert(0, axis)
                wanted = rest
                continue
            if self._sizes[axis].over(wanted) is None:
                raise Unsupported(f"size {self._sizes[axis].text} cannot be cut at {wanted.text}")
            major, inner = self.split(axis, wanted)
            left.extend(major)
            right[:0] = inner
            wanted = ONE
        return tuple(left), tuple(right)

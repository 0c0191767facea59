"""Views, slices and concatenations as bookkeeping on axes: they move no data in a fused kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from agent.proposers.playbook.pointwise import Builder, Complex
from agent.proposers.playbook.sizes import ONE, Axes, Group, Size, Unsupported, product
from agent.proposers.playbook.values import Join, Pick, Piece, Value

UNROLL_LIMIT = 8


def _view(value: Value, dims: Sequence[Group]) -> Value:
    return Value("pass", (value,), tuple(dims), value.dtype)


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same view of both parts of a complex tensor."""

    def apply(builder: Builder, x: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(x, Complex):
            parts = (function(builder, part, *arguments, **options) for part in (x.real, x.imaginary))
            return Complex(*parts)
        return function(builder, x, *arguments, **options)

    return apply


def _flat(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], tuple) else tuple(arguments)


def _sizes(entries: Sequence[Any]) -> list[Size | None]:
    """Sizes, None standing for -1."""
    return [entry if isinstance(entry, Size) else None if entry == -1 else Size(int(entry)) for entry in entries]


def _reshape(builder: Builder, x: Value, *shape: Any) -> Value:
    axes = builder.axes
    wanted = _sizes(_flat(shape))
    whole = tuple(axis for group in x.dims for axis in axes.leaves(group))
    total = product([axes.size(axis) for axis in whole])
    if None in wanted:
        rest = total.over(product([size for size in wanted if size is not None]))
        if rest is None:
            raise Unsupported("a -1 that does not come out even")
        wanted = [rest if size is None else size for size in wanted]
    dims: list[Group] = []
    for size in reversed(wanted):
        whole, minor = axes.cut(whole, size or ONE)
        dims.insert(0, minor)
    if axes.leaves(whole):
        raise Unsupported("a reshape to another number of elements")
    return _view(x, dims)


def _flatten(_: Builder, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    rank = len(x.dims)
    start, end = start_dim % rank, end_dim % rank
    merged = tuple(axis for group in x.dims[start : end + 1] for axis in group)
    return _view(x, (*x.dims[:start], merged, *x.dims[end + 1 :]))


def _unflatten(builder: Builder, x: Value, dim: int, sizes: Any) -> Value:
    shape = builder.shape(x)
    dim %= len(shape)
    return _reshape(builder, x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _transpose(_: Builder, x: Value, dim0: int, dim1: int) -> Value:
    dims = list(x.dims)
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _view(x, dims)


def _permute(_: Builder, x: Value, *dims: Any) -> Value:
    return _view(x, [x.dims[place] for place in _flat(dims)])


def _unsqueeze(_: Builder, x: Value, dim: int) -> Value:
    dims = list(x.dims)
    dims.insert(dim if dim >= 0 else dim + len(dims) + 1, ())
    return _view(x, dims)


def _squeeze(builder: Builder, x: Value, dim: int | None = None) -> Value:
    if dim is None:
        return _view(x, [group for group in x.dims if builder.axes.leaves(group)])
    dims = list(x.dims)
    if not builder.axes.leaves(dims[dim]):
        del dims[dim]
    return _view(x, dims)


def _expand(builder: Builder, x: Value, *shape: Any) -> Value:
    wanted = _sizes(_flat(shape))
    dims: list[Group] = [()] * (len(wanted) - len(x.dims)) + list(x.dims)
    for place, size in enumerate(wanted):
        if size is not None and size != ONE and not builder.axes.leaves(dims[place]):
            dims[place] = builder.axes.group(size)
    return _view(x, dims)


def _expand_as(builder: Builder, x: Value, other: Value) -> Value:
    return _expand(builder, x, builder.shape(other))


def _getitem(builder: Builder, x: Any, index: Any) -> Any:
    if isinstance(x, tuple | list):
        return x[index]
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    fill = [slice(None)] * (len(x.dims) - used)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = fill
    place = 0
    for entry in entries:
        if entry is None:
            x = _unsqueeze(builder, x, place)
        elif isinstance(entry, slice):
            x = _slice(builder, x, place, entry)
        elif isinstance(entry, int):
            x = _select(builder, x, place, entry)
            continue
        else:
            raise Unsupported(f"an index {entry!r}")
        place += 1
    return x


def _length(builder: Builder, x: Value, dim: int) -> int:
    constant = builder.shape(x)[dim].constant
    if constant is None:
        raise Unsupported("a slice of a dimension that varies")
    return constant


def _select(builder: Builder, x: Value, dim: int, index: int) -> Value:
    length = _length(builder, x, dim)
    picked = _slice(builder, x, dim, slice(index % length, index % length + 1))
    return _view(picked, [group for place, group in enumerate(picked.dims) if place != dim % len(x.dims)])


def _slice(builder: Builder, x: Value, dim: int, part: slice) -> Value:
    whole = builder.shape(x)[dim]
    if part.start in (None, 0) and part.step in (None, 1) and (part.stop is None or part.stop == whole):
        return x
    if isinstance(part.start, Size) or isinstance(part.stop, Size):
        part = slice(*(entry.constant if isinstance(entry, Size) else entry for entry in (part.start, part.stop)))
    length = _length(builder, x, dim)
    start, stop, step = part.indices(length)
    if step != 1:
        return _strided(builder, x, dim, start, stop, step, length)
    return _range(builder, x, dim, start, stop, length) if (start, stop) != (0, length) else x


def _strided(builder: Builder, x: Value, dim: int, start: int, stop: int, step: int, length: int) -> Value:
    """x[..., start::step]: the minor part of the axis is fixed."""
    if length % step or start >= step or stop < length:
        raise Unsupported("a slice with this step")
    major, minor = builder.axes.cut(x.dims[dim], Size(step))
    source = _static(builder.axes, minor)
    return Value("pick", (x,), _with(x.dims, dim, major), x.dtype, Pick(source, None, start))


def _range(builder: Builder, x: Value, dim: int, start: int, stop: int, length: int) -> Value:
    """x[..., start:stop]: the axis is cut into equal blocks, the range is a few of them."""
    axes = builder.axes
    block = math.gcd(math.gcd(start, stop), length)
    if stop <= start or length // block > UNROLL_LIMIT:
        raise Unsupported(f"a slice [{start}:{stop}] of {length}")
    major, minor = axes.cut(x.dims[dim], Size(block))
    source = _static(axes, major)
    count = (stop - start) // block
    if count == 1:
        return Value("pick", (x,), _with(x.dims, dim, minor), x.dtype, Pick(source, None, start // block))
    axis = axes.new(Size(count), static=True)
    return Value("pick", (x,), _with(x.dims, dim, (axis, *minor)), x.dtype, Pick(source, axis, start // block))


def _static(axes: Axes, group: Group) -> int:
    """The one axis of a group, unrolled from now on."""
    leaves = axes.leaves(group)
    if len(leaves) != 1:
        leaves = (_fuse(axes, leaves),)
    axes.make_static(leaves[0])
    return leaves[0]


def _fuse(axes: Axes, leaves: Group) -> int:
    whole = axes.new(axes.extent(leaves))
    axes.unify((whole,), leaves)
    for leaf in axes.leaves((whole,)):
        axes.make_static(leaf)
    return whole


def _with(dims: Sequence[Group], dim: int, group: Group) -> tuple[Group, ...]:
    changed = list(dims)
    changed[dim] = group
    return tuple(changed)


def _cat(builder: Builder, tensors: Any, dim: int = 0) -> Value:
    axes = builder.axes
    lengths = [_length(builder, value, dim) for value in tensors]
    block = math.gcd(*lengths)
    if sum(lengths) // block > UNROLL_LIMIT:
        raise Unsupported(f"a concatenation of {lengths}")
    pieces: list[Piece] = []
    minors: list[Group] = []
    for value, length in zip(tensors, lengths, strict=True):
        major, minor = axes.cut(value.dims[dim], Size(block))
        source = _static(axes, major) if length > block else None
        pieces.append(Piece(source, sum(piece.count for piece in pieces), length // block))
        minors.append(minor)
    axis = axes.new(Size(sum(lengths) // block), static=True)
    for place, group in enumerate(tensors[0].dims):
        for value, minor in zip(tensors[1:], minors[1:], strict=True):
            axes.unify(*(minors[0], minor) if place == dim % len(value.dims) else (group, value.dims[place]))
    dims = _with(tensors[0].dims, dim, (axis, *minors[0]))
    return Value("join", tuple(tensors), dims, tensors[0].dtype, Join(axis, tuple(pieces)))


def _stack(builder: Builder, tensors: Any, dim: int = 0) -> Value:
    dim = dim if dim >= 0 else dim + len(tensors[0].dims) + 1
    return _cat(builder, tuple(_unsqueeze(builder, value, dim) for value in tensors), dim)


def _chunk(builder: Builder, x: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    length = _length(builder, x, dim)
    return _split(builder, x, -(-length // chunks), dim)


def _split(builder: Builder, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    length = _length(builder, x, dim)
    if isinstance(sizes, Size):
        sizes = sizes.constant
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(_slice(builder, x, dim, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def _unbind(builder: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select(builder, x, dim, index) for index in range(_length(builder, x, dim)))


def _as_complex(builder: Builder, x: Value) -> Complex:
    source = _static(builder.axes, x.dims[-1])
    return Complex(*(Value("pick", (x,), x.dims[:-1], x.dtype, Pick(source, None, part)) for part in (0, 1)))


def _as_real(builder: Builder, x: Complex) -> Value:
    return _stack(builder, (x.real, x.imaginary), -1)


SHAPING: dict[str, Callable[..., Any]] = {
    "view": _both(_reshape),
    "reshape": _both(_reshape),
    "flatten": _both(_flatten),
    "unflatten": _both(_unflatten),
    "transpose": _both(_transpose),
    "swapaxes": _both(_transpose),
    "permute": _both(_permute),
    "unsqueeze": _both(_unsqueeze),
    "squeeze": _both(_squeeze),
    "expand": _both(_expand),
    "broadcast_to": _both(_expand),
    "expand_as": _expand_as,
    "view_as": lambda builder, x, other: _reshape(builder, x, builder.shape(other)),
    "getitem": _both(_getitem),
    "select": _both(_select),
    "narrow": lambda builder, x, dim, start, length: _slice(builder, x, dim, slice(start, start + length)),
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "chunk": _chunk,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
    "size": lambda builder, x, dim=None: builder.shape(x) if dim is None else builder.shape(x)[dim],
}

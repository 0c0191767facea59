"""Reductions and what is made of them: mean, variance, softmax and the norms, as the fuser's values."""

# ruff: noqa: FBT001, FBT002 - the arguments are those of torch

from collections.abc import Callable, Sequence
from typing import Any

from agent.proposers.playbook.pointwise import Builder
from agent.proposers.playbook.sizes import Size, Unsupported
from agent.proposers.playbook.values import Value


def _places(value: Value, dim: Any) -> tuple[int, ...]:
    rank = len(value.dims)
    if dim is None or dim == ():
        return tuple(range(rank))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return tuple(sorted({entry % rank for entry in dims}))


def _wide(builder: Builder, value: Value, dtype: Any) -> Value:
    wanted = getattr(dtype, "name", None)
    return builder.cast(value, wanted) if wanted else builder.floating(value)


def _sum(builder: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    if x.dtype in ("int32", "int64", "bool") and dtype is None:
        raise Unsupported("a sum of integers")
    return builder.reduce("sum", _wide(builder, x, dtype), _places(x, dim), keepdim=keepdim)


def _mean(builder: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    places = _places(x, dim)
    total = builder.reduce("sum", _wide(builder, x, dtype), places, keepdim=keepdim)
    return builder.make("div", total, builder.count(x, places))


def _amax(builder: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return builder.reduce("max", x, _places(x, dim), keepdim=keepdim)


def _amin(builder: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return builder.reduce("min", x, _places(x, dim), keepdim=keepdim)


def _max(builder: Builder, x: Value, other: Any = None, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(other, Value):
        return builder.make("maximum", x, other)
    if other is not None or dim is not None:
        raise Unsupported("a max with indices")
    return _amax(builder, x, None, keepdim)


def _centred(builder: Builder, x: Value, places: Sequence[int]) -> Value:
    total = builder.reduce("sum", x, places, keepdim=True)
    mean = builder.make("div", total, builder.count(x, places))
    return builder.make("sub", x, mean)


def _variance(builder: Builder, centred: Value, places: Sequence[int], *, keepdim: bool, correction: int = 0) -> Value:
    squares = builder.reduce("sum", builder.make("mul", centred, centred), places, keepdim=keepdim)
    count: Any = builder.count(centred, places)
    if correction:
        count = builder.make("sub", builder.cast(builder.lift(count), "float32"), float(correction))
    return builder.make("div", squares, count)


def _var(
    builder: Builder,
    x: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
) -> Value:
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    places = _places(x, dim)
    centred = _centred(builder, builder.floating(x), places)
    return _variance(builder, centred, places, keepdim=keepdim, correction=int(correction))


def _std(builder: Builder, *arguments: Any, **options: Any) -> Value:
    return builder.make("sqrt", _var(builder, *arguments, **options))


def _exponentials(builder: Builder, x: Value, dim: Any, dtype: Any) -> tuple[Value, Value, Value, Value]:
    value = _wide(builder, x, dtype)
    places = _places(x, dim)
    top = builder.reduce("max", value, places, keepdim=True, exact_nan=False)
    shifted = builder.make("sub", value, top)
    powers = builder.make("power", shifted)
    return top, shifted, powers, builder.reduce("sum", powers, places, keepdim=True)


def _softmax(builder: Builder, x: Value, dim: Any = -1, dtype: Any = None, **_: Any) -> Value:
    powers, total = _exponentials(builder, x, dim, dtype)[2:]
    value = builder.make("mul", powers, builder.make("reciprocal", total))
    value.dtype = getattr(dtype, "name", None) or x.dtype
    return value


def _log_softmax(builder: Builder, x: Value, dim: Any = -1, dtype: Any = None, **_: Any) -> Value:
    shifted, total = _exponentials(builder, x, dim, dtype)[1::2]
    return builder.make("sub", shifted, builder.make("log", total))


def _affine(builder: Builder, value: Value, weight: Any, bias: Any) -> Value:
    if weight is not None:
        value = builder.make("mul", value, weight)
    return value if bias is None else builder.make("add", value, bias)


def _layer_norm(
    builder: Builder, x: Value, shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> Value:
    places = tuple(range(len(x.dims) - len(shape), len(x.dims)))
    centred = _centred(builder, x, places)
    variance = _variance(builder, centred, places, keepdim=True)
    scale = builder.make("rsqrt", builder.make("add", variance, eps))
    return _affine(builder, builder.make("mul", centred, scale), weight, bias)


def _rms_norm(builder: Builder, x: Value, shape: Any, weight: Any = None, eps: Any = None) -> Value:
    if eps is None:
        eps = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[x.dtype]
    places = tuple(range(len(x.dims) - len(shape), len(x.dims)))
    squares = builder.reduce("sum", builder.make("mul", x, x), places, keepdim=True)
    mean = builder.make("div", squares, builder.count(x, places))
    scale = builder.make("rsqrt", builder.make("add", mean, eps))
    return _affine(builder, builder.make("mul", x, scale), weight, None)


def _group_norm(
    builder: Builder, x: Value, groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, *_: Any
) -> Value:
    axes = builder.axes
    channels = axes.extent(axes.leaves(x.dims[1]))
    inner = channels.over(Size(groups))
    if inner is None:
        raise Unsupported("channels that do not divide into groups")
    major, minor = axes.cut(x.dims[1], inner)
    split = Value("pass", (x,), (x.dims[0], major, minor, *x.dims[2:]), x.dtype)
    places = tuple(range(2, len(split.dims)))
    centred = _centred(builder, split, places)
    variance = _variance(builder, centred, places, keepdim=True)
    value = builder.make("mul", centred, builder.make("rsqrt", builder.make("add", variance, eps)))
    joined = Value("pass", (value,), (value.dims[0], (*value.dims[1], *value.dims[2]), *value.dims[3:]), x.dtype)
    per_channel = [part and _trailing(part, len(x.dims) - 2) for part in (weight, bias)]
    return _affine(builder, joined, *per_channel)


def _trailing(value: Value, ones: int) -> Value:
    return Value("pass", (value,), (*value.dims, *[()] * ones), value.dtype)


COMPOSITES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _amax,
    "amin": _amin,
    "max": _max,
    "var": _var,
    "std": _std,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
}

"""Builds the fuser's values: broadcasting, casts and every pointwise operation it knows."""

# ruff: noqa: FBT002, ARG001 - the arguments are those of torch

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.proposers.playbook.sizes import Axes, Group, Size, Unsupported
from agent.proposers.playbook.values import FLOATS, INTEGERS, Reduction, Value


@dataclass(frozen=True)
class Complex:
    """A complex tensor as its two real parts."""

    real: Value
    imaginary: Value


class Builder:
    """Makes values, unifying the axes of operands as broadcasting demands."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def shape(self, value: Value | Complex) -> tuple[Size, ...]:
        """The symbolic shape."""
        dims = value.real.dims if isinstance(value, Complex) else value.dims
        return tuple(self.axes.extent(self.axes.leaves(group)) for group in dims)

    def lift(self, operand: Any) -> Value:
        """A tensor operand as it is; a number as a literal."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Size):
            return Value("size", (), (), "scalar", operand)
        if isinstance(operand, bool | int | float):
            return Value("literal", (), (), "scalar", operand)
        raise Unsupported(f"operand {operand!r}")

    def broadcast(self, operands: Sequence[Value]) -> tuple[Group, ...]:
        """The dims of a pointwise result."""
        rank = max((len(value.dims) for value in operands), default=0)
        dims: list[Group] = [()] * rank
        for value in operands:
            for place, group in enumerate(value.dims, start=rank - len(value.dims)):
                if not self.axes.leaves(group):
                    continue
                if self.axes.leaves(dims[place]):
                    self.axes.unify(dims[place], group)
                else:
                    dims[place] = group
        return tuple(dims)

    def make(self, op: str, *operands: Any, dtype: str | None = None) -> Value:
        """A pointwise value with broadcasting and PyTorch's type promotion."""
        values = tuple(self.lift(operand) for operand in operands)
        return Value(op, values, self.broadcast(values), dtype or promote(values))

    def cast(self, value: Value, dtype: str) -> Value:
        """Round to `dtype`, exactly where the original does."""
        if dtype not in (*FLOATS, *INTEGERS, "bool"):
            raise Unsupported(f"a cast to {dtype}")
        if value.dtype == dtype:
            return value
        if value.op in ("literal", "size", "constant"):
            return Value(value.op, (), value.dims, dtype, value.payload, value.name)
        return Value("cast", (value,), value.dims, dtype, None, value.name and f"{value.name}_{SHORT[dtype]}")

    def floating(self, value: Value) -> Value:
        """Integers and booleans become float32, as torch's float-only functions make them."""
        return self.cast(value, "float32") if value.dtype in (*INTEGERS, "bool") else value

    def reduce(self, kind: str, value: Value, places: Sequence[int], *, keepdim: bool, exact_nan: bool = True) -> Value:
        """Sum, max or min over the dimensions `places`."""
        group = tuple(axis for place in places for axis in value.dims[place])
        kept: list[Group] = []
        for place, dim in enumerate(value.dims):
            if place not in places:
                kept.append(dim)
            elif keepdim:
                kept.append(())
        return Value("reduce", (value,), tuple(kept), value.dtype, Reduction(kind, group, exact_nan))

    def count(self, value: Value, places: Sequence[int]) -> Size:
        """How many elements are combined over `places`."""
        total = Size(1)
        for place in places:
            total = total * self.axes.extent(self.axes.leaves(value.dims[place]))
        return total


SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32", "bool": "flag"}
RANKS = ("bool", "int32", "int64", "float16", "bfloat16", "float32")


def promote(values: Sequence[Value]) -> str:
    """PyTorch's result dtype, for the few dtypes known here; Python numbers do not widen tensors of their kind."""
    tensors = [value for value in values if value.dtype != "scalar"]
    if not tensors:
        return "scalar"
    kinds = {value.dtype for value in tensors}
    if {"float16", "bfloat16"} <= kinds:
        return "float32"
    best = max(kinds, key=RANKS.index)
    wide = [value for value in tensors if value.dims]
    if wide and len(wide) < len(tensors):  # zero-dimensional tensors only count when they are of a higher category
        among = max((value.dtype for value in wide), key=RANKS.index)
        best = among if (among in FLOATS) == (best in FLOATS) else best
    floats = any(isinstance(value.payload, float) for value in values if value.dtype == "scalar")
    return "float32" if floats and best not in FLOATS else best


def _unary(op: str) -> Callable[..., Any]:
    def build(builder: Builder, x: Any) -> Value:
        return builder.make(op, builder.floating(builder.lift(x)))

    return build


def _compare(op: str) -> Callable[..., Any]:
    def build(builder: Builder, a: Any, b: Any) -> Value:
        return builder.make(op, a, b, dtype="bool")

    return build


def _add(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
    if isinstance(a, Complex) and isinstance(b, Complex):
        return Complex(builder.make("add", a.real, b.real), builder.make("add", a.imaginary, b.imaginary))
    if isinstance(b, Value) and b.op == "tanh" and not isinstance(a, Value):
        a, b = b, a
    if (
        isinstance(a, Value) and a.op == "tanh" and not isinstance(b, Value) and b == 1
    ):  # 1 + tanh(x) = 2 / (1 + e^-2x), which does not cancel
        return builder.make("mul", builder.make("sigmoid", builder.make("mul", a.args[0], 2.0)), 2.0)
    return builder.make("add", a, b if alpha == 1 else builder.make("mul", b, alpha))


def _sub(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Any:
    return builder.make("sub", a, b if alpha == 1 else builder.make("mul", b, alpha))


def _mul(builder: Builder, a: Any, b: Any) -> Any:
    if isinstance(a, Complex) and isinstance(b, Complex):
        real = builder.make("sub", builder.make("mul", a.real, b.real), builder.make("mul", a.imaginary, b.imaginary))
        cross = builder.make("mul", a.real, b.imaginary)
        return Complex(real, builder.make("add", cross, builder.make("mul", a.imaginary, b.real)))
    return builder.make("mul", a, b)


def _div(builder: Builder, a: Any, b: Any, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None:
        raise Unsupported("a rounding division")
    return builder.make("div", builder.floating(builder.lift(a)), builder.floating(builder.lift(b)))


def _pow(builder: Builder, x: Any, exponent: Any) -> Value:
    value = builder.lift(x)
    if isinstance(exponent, Value) and exponent.op == "constant":
        exponent = exponent.payload  # the target's constants are fixed
    simple: dict[float, Callable[[], Value]] = {
        1.0: lambda: value,
        2.0: lambda: builder.make("mul", value, value),
        3.0: lambda: builder.make("mul", builder.make("mul", value, value), value),
        0.5: lambda: builder.make("sqrt", value),
        -0.5: lambda: builder.make("rsqrt", value),
        -1.0: lambda: builder.make("reciprocal", value),
    }
    if isinstance(exponent, int | float) and float(exponent) in simple:
        return simple[float(exponent)]()
    return builder.make("pow", builder.floating(value), exponent)


def _silu(builder: Builder, x: Any, inplace: Any = False) -> Value:
    return builder.make("silu", _outside(x, inplace))


def _relu(builder: Builder, x: Any, inplace: Any = False) -> Value:
    return builder.make("relu", _outside(x, inplace))


def _outside(x: Any, inplace: Any) -> Any:
    if inplace:
        raise Unsupported("an in-place operation")
    return x


def _gelu(builder: Builder, x: Any, approximate: str = "none") -> Value:
    half = builder.make("mul", x, 0.5)
    if approximate == "tanh":
        cube = builder.make("mul", builder.make("mul", x, x), x)
        inner = builder.make("mul", builder.make("add", x, builder.make("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        return builder.make("mul", half, _add(builder, builder.make("tanh", inner), 1.0))
    scaled = builder.make("mul", x, math.sqrt(0.5))
    return builder.make("mul", half, builder.make("add", builder.make("erf", scaled), 1.0))


def _where(builder: Builder, condition: Any, a: Any, b: Any) -> Value:
    values = (builder.lift(condition), builder.lift(a), builder.lift(b))
    return Value("where", values, builder.broadcast(values), promote(values[1:]))


def _masked_fill(builder: Builder, x: Any, mask: Any, value: Any) -> Value:
    chosen = builder.lift(value)
    values = (builder.lift(mask), chosen, builder.lift(x))
    return Value("where", values, builder.broadcast(values), builder.lift(x).dtype)


def _clamp(builder: Builder, x: Any, min: Any = None, max: Any = None) -> Value:  # noqa: A002 - torch's names
    value = builder.lift(x)
    value = value if min is None else builder.make("maximum", value, min)
    return value if max is None else builder.make("minimum", value, max)


def _addcmul(builder: Builder, x: Any, a: Any, b: Any, value: Any = 1) -> Value:
    scaled = builder.make("mul", a, b)
    return builder.make("add", x, scaled if value == 1 else builder.make("mul", scaled, value))


def _dropout(builder: Builder, x: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Any:
    if training and p != 0.0:
        raise Unsupported("dropout in training")
    return _outside(x, inplace)


def _softplus(builder: Builder, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Value:
    scaled = builder.make("mul", x, beta)
    soft = builder.make("div", builder.make("log", builder.make("add", builder.make("exp", scaled), 1.0)), beta)
    return _where(builder, builder.make("gt", scaled, threshold, dtype="bool"), x, soft)


def _flag(x: Any) -> Any:
    if isinstance(x, Value) and x.dtype != "bool":
        raise Unsupported("a bitwise operation on integers")
    return x


def _passthrough(builder: Builder, x: Any, *_: Any, **__: Any) -> Any:
    return x


POINTWISE: dict[str, Callable[..., Any]] = {
    "add": _add,
    "iadd": _add,
    "radd": _add,
    "sub": _sub,
    "rsub": lambda builder, a, b: builder.make("sub", b, a),
    "mul": _mul,
    "div": _div,
    "truediv": _div,
    "true_divide": _div,
    "pow": _pow,
    "square": lambda builder, x: builder.make("mul", x, x),
    "neg": lambda builder, x: builder.make("neg", x),
    "abs": lambda builder, x: builder.make("abs", x),
    "reciprocal": _unary("reciprocal"),
    "sqrt": _unary("sqrt"),
    "rsqrt": _unary("rsqrt"),
    "exp": _unary("exp"),
    "log": _unary("log"),
    "tanh": _unary("tanh"),
    "erf": _unary("erf"),
    "sin": _unary("sin"),
    "cos": _unary("cos"),
    "sigmoid": _unary("sigmoid"),
    "silu": _silu,
    "relu": _relu,
    "gelu": _gelu,
    "softplus": _softplus,
    "maximum": lambda builder, a, b: builder.make("maximum", a, b),
    "minimum": lambda builder, a, b: builder.make("minimum", a, b),
    "clamp": _clamp,
    "clamp_min": lambda builder, x, bound: builder.make("maximum", x, bound),
    "clamp_max": lambda builder, x, bound: builder.make("minimum", x, bound),
    "where": _where,
    "masked_fill": _masked_fill,
    "addcmul": _addcmul,
    "dropout": _dropout,
    "identity": _passthrough,
    "detach": _passthrough,
    **dict.fromkeys(("invert", "bitwise_not"), lambda builder, x: builder.make("not", _flag(x), dtype="bool")),
    **dict.fromkeys(("and", "bitwise_and"), lambda b, x, y: b.make("and", _flag(x), _flag(y), dtype="bool")),
    **dict.fromkeys(("or", "bitwise_or"), lambda b, x, y: b.make("or", _flag(x), _flag(y), dtype="bool")),
    "logical_not": lambda builder, x: builder.make("not", x, dtype="bool"),
    "logical_and": lambda builder, a, b: builder.make("and", a, b, dtype="bool"),
    "logical_or": lambda builder, a, b: builder.make("or", a, b, dtype="bool"),
    **{name: _compare(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}

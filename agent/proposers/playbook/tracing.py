"""Reads a target's op graph into the fuser's values: every operation it knows, over symbolic axes."""

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.proposers.playbook import composites, shaping
from agent.proposers.playbook.pointwise import POINTWISE, Builder, Complex
from agent.proposers.playbook.sizes import Axes, Size, Unsupported
from agent.proposers.playbook.values import FLOATS, INTEGERS, Pick, Region, Value
from harness.records import OpNode, Target, TensorSpec

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
NAMES: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan, "Ellipsis": ...}


@dataclass(frozen=True)
class Dtype:
    """A torch dtype literal, e.g. `torch.float32`."""

    name: str


def trace(target: Target) -> Region:
    """The target as values. Raises Unsupported for anything that the fuser does not know."""
    tracer = _Tracer(target)
    for node in target.graph:
        tracer.run(node)
    for name, spec in zip(target.results, target.outputs, strict=True):
        value = tracer.names[name]
        if not isinstance(value, Value):
            raise Unsupported(f"{name} is no real tensor")
        tracer.region.outputs.append(tracer.builder.cast(value, spec.dtype))
    return tracer.region


class _Tracer:
    def __init__(self, target: Target) -> None:
        self.region = Region(Axes())
        self.builder = Builder(self.region.axes)
        self.names: dict[str, Any] = dict(NAMES)
        for index, spec in enumerate(target.inputs):
            self.names[spec.name] = self._load(index, spec)
        for name, constant in target.constants.items():
            self.names[name] = self._constant(name, constant)

    def _load(self, index: int, spec: TensorSpec) -> Value | Complex:
        axes = self.region.axes
        groups = tuple(axes.group(Size(dim) if isinstance(dim, int) else Size(1, (dim,))) for dim in spec.dims)
        if spec.dtype == "complex64":
            pair = axes.new(Size(2), static=True)
            value = Value("load", (), (*groups, (pair,)), "float32", index, spec.name)
            parts = [Value("pick", (value,), groups, "float32", Pick(pair, None, part)) for part in (0, 1)]
            self.region.loads.append(value)
            return Complex(*parts)
        if spec.dtype not in (*FLOATS, *INTEGERS, "bool"):
            raise Unsupported(f"{spec.name} is {spec.dtype}")
        value = Value("load", (), groups, spec.dtype, index, spec.name)
        self.region.loads.append(value)
        return value

    def _constant(self, name: str, constant: Any) -> Any:
        if isinstance(constant, float) and math.isfinite(constant):
            return Value("constant", (), (), "scalar", constant, name)
        if isinstance(constant, str) and constant.startswith("torch."):
            return Dtype(constant.removeprefix("torch."))
        return constant

    def run(self, node: OpNode) -> None:
        arguments = [self.evaluate(source) for source in node.args]
        options = {name: self.evaluate(source) for name, source in node.kwargs}
        result = self._apply(node, arguments, options)
        if isinstance(result, Value):
            result.name = result.name or node.name
        self.names[node.name] = result

    def _apply(self, node: OpNode, arguments: list[Any], options: dict[str, Any]) -> Any:
        name = node.op.rsplit(".", 1)[-1].rstrip("_") if node.op != "_" else node.op
        try:
            if name in POINTWISE:
                return POINTWISE[name](self.builder, *arguments, **options)
            if name in composites.COMPOSITES:
                return composites.COMPOSITES[name](self.builder, *arguments, **options)
            if name in shaping.SHAPING:
                return shaping.SHAPING[name](self.builder, *arguments, **options)
            if name in ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"):
                return self._convert(name, arguments, options)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise Unsupported(f"{node.op}{node.args}: {error}") from error
        raise Unsupported(f"the fuser does not know {node.op}")

    def _convert(self, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        value = arguments[0]
        named = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
        if name in ("contiguous", "clone"):
            return value
        wanted = named.get(name)
        for candidate in [*arguments[1:], options.get("dtype"), options.get("other")]:
            if isinstance(candidate, Dtype):
                wanted = candidate.name
            elif isinstance(candidate, Value):
                wanted = candidate.dtype
        if wanted is None:
            return value  # only a device or a memory format
        if isinstance(value, Complex):
            raise Unsupported("a cast of a complex tensor")
        return self.builder.cast(value, wanted)

    def evaluate(self, source: str) -> Any:
        """One argument, given as Python source."""
        try:
            return self._expression(ast.parse(source, mode="eval").body)
        except SyntaxError as error:
            raise Unsupported(f"argument {source!r} is not Python") from error

    def _expression(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                if name not in self.names:
                    raise Unsupported(f"unknown name {name}")
                return self.names[name]
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return tuple(self._expression(item) for item in items)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._expression(operand)
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in ARITHMETIC:
                return self._arithmetic(kind, self._expression(left), self._expression(right))
            case ast.Attribute():
                return self._attribute(tree)
            case ast.Subscript(value=base, slice=index):
                return self._subscript(self._expression(base), index)
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if part is None else self._expression(part) for part in (lower, upper, step)))
            case ast.Call():
                return self._call(tree)
        raise Unsupported(f"argument {ast.unparse(tree)!r}")

    def _arithmetic(self, kind: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(left, Size) or isinstance(right, Size):
            return _size_arithmetic(kind, _as_size(left), _as_size(right))
        return ARITHMETIC[type(kind)](left, right)

    def _attribute(self, tree: ast.Attribute) -> Any:
        if isinstance(tree.value, ast.Name) and tree.value.id in ("torch", "math"):
            return NAMES.get(tree.attr, Dtype(tree.attr))
        base = self._expression(tree.value)
        if tree.attr == "shape" and isinstance(base, Value):
            return self.builder.shape(base)
        if tree.attr == "dtype" and isinstance(base, Value):
            return Dtype(base.dtype)
        if tree.attr == "device":
            return None
        raise Unsupported(f"attribute {tree.attr}")

    def _subscript(self, base: Any, index: ast.expr) -> Any:
        if not isinstance(base, tuple):
            raise Unsupported(f"subscript of {base}")
        return base[self._expression(index)]

    def _call(self, tree: ast.Call) -> Any:
        arguments = [self._expression(argument) for argument in tree.args]
        match tree.func:
            case ast.Name(id="slice"):
                return slice(*arguments)
            case ast.Name(id="float") if isinstance(arguments[0], str | int | float):
                return float(arguments[0])
            case ast.Attribute(value=base, attr="size"):
                shape = self.builder.shape(self._expression(base))
                return shape[arguments[0]] if arguments else shape
        raise Unsupported(f"call {ast.unparse(tree)!r}")


def _as_size(value: Any) -> Size:
    if isinstance(value, Size):
        return value
    if isinstance(value, int):
        return Size(value)
    raise Unsupported(f"{value!r} is no size")


def _size_arithmetic(kind: ast.operator, left: Size, right: Size) -> Any:
    if isinstance(kind, ast.Mult):
        return left * right
    if isinstance(kind, ast.FloorDiv):
        quotient = left.over(right)
        if quotient is not None:
            return quotient
    if not left.symbols and not right.symbols:
        return Size(ARITHMETIC[type(kind)](left.factor, right.factor))
    raise Unsupported(f"size arithmetic on {left.text} and {right.text}")

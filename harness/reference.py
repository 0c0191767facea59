"""Writes a region as readable Python: `def reference(<inputs>, *, <constants>)`, importing torch alone.

The source runs in a clean process and reproduces the captured outputs bit for bit at the captured size; shape
arguments that vary are written through the inputs' own shapes.
"""

import ast
import builtins
import keyword
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.fx import Node

from harness.partition import Family, is_parameter
from harness.records import OpNode, Scalar
from harness.regions import Region
from harness.symbols import Symbols

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
CANONICAL = {
    "truediv": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "and_": "and",
    "or_": "or",
    "float": "to",
    "half": "to",
    "bfloat16": "to",
    "double": "to",
    "type_as": "to",
    "iadd": "add",
    "concat": "cat",
    "concatenate": "cat",
    "mm": "matmul",
    "bmm": "matmul",
    "conv1d": "conv",
    "conv2d": "conv",
    "conv3d": "conv",
}
CAST_METHODS = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
ATTENTION_NAMES = ("q", "k", "v", "mask", "bias")
PLAIN_NAMES = ("x", "y", "z", "u", "v", "w")


@dataclass(frozen=True)
class Written:
    """A region as source, and the same as records."""

    source: str
    graph: tuple[OpNode, ...]
    results: tuple[str, ...]
    constants: Mapping[str, Scalar]
    inputs: tuple[str, ...]


@dataclass
class _Writer:
    """Names and constants handed out so far."""

    region: Region
    symbols: Symbols | None
    names: dict[Node, str] = field(default_factory=dict)
    constants: dict[str, Scalar] = field(default_factory=dict)

    def expression(self, symbolic: str) -> str:
        """ "=256*S" as Python, reading S from an input's shape."""
        factors = symbolic[1:].split("*")
        return " * ".join(factor if factor.isdigit() else self.symbol(factor) for factor in factors)

    def symbol(self, name: str) -> str:
        """A symbol as Python: the shape of the input where it stands alone."""
        assert self.symbols is not None, name
        place, dim = self.symbols.places[name]
        return f"{self.names[self.region.inputs[place]]}.shape[{dim}]"


def write_reference(region: Region, pattern: Mapping[str, Any], symbols: Symbols | None) -> Written:
    """The region as a function. `pattern` is its structure with varying numbers written symbolically."""
    writer = _Writer(region, symbols)
    for node, name in zip(region.inputs, input_names(region), strict=True):
        writer.names[node] = name
    taken = set(writer.names.values())
    graph: list[OpNode] = []
    lines: list[str] = []
    for node, call in zip(region.nodes, pattern["nodes"], strict=True):
        name = _fresh(_clean(node.name), taken)
        taken.add(name)
        args, kwargs = _arguments(node, call, writer)
        lines.append(f"    {name} = {_statement(node, args, kwargs)}")
        writer.names[node] = name
        graph.append(_op_node(node, name, args, kwargs, region))
    results = tuple(writer.names[node] for node in region.outputs)
    return Written(
        _function(tuple(writer.names[node] for node in region.inputs), writer.constants, lines, results),
        tuple(graph),
        results,
        writer.constants,
        tuple(writer.names[node] for node in region.inputs),
    )


def _function(inputs: Sequence[str], constants: Mapping[str, Scalar], lines: list[str], results: Sequence[str]) -> str:
    keywords = "".join(f", {name}={value!r}" for name, value in constants.items())
    head = f"def reference({', '.join(inputs)}{', *' + keywords if keywords else ''}):"
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    body = "\n".join(lines)
    imports = "import torch\nimport torch.nn.functional as F\n" if "F." in body else "import torch\n"
    return f"{imports}\n\n{head}\n{body}\n    return {returned}\n"


def input_names(region: Region) -> list[str]:
    """Readable argument names: what the model calls its weights, q, k, v for attention, x, y, ... otherwise."""
    names: list[str] = []
    plain = list(ATTENTION_NAMES if _is_attention(region) else PLAIN_NAMES)
    taken: set[str] = set()
    for index, node in enumerate(region.inputs):
        name = _weight_name(node) or (plain.pop(0) if plain else f"x{index}")
        name = _fresh(name, taken)
        taken.add(name)
        names.append(name)
    return names


def _is_attention(region: Region) -> bool:
    fused = any("attention" in name for name in region.facts.ops.get(region.nodes[0], ()))
    return region.family is Family.ATTENTION or (region.family is Family.HEAVY and fused)


def _weight_name(node: Node) -> str | None:
    if node.op != "placeholder":
        return None
    for kind in ("_parameters_", "_buffers_"):
        if kind in node.name:
            name = node.name.rsplit(kind, 1)[1].strip("_")
            return _clean(name) if name and (is_parameter(node) or kind == "_buffers_") else None
    return None


def _clean(name: str) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in name).strip("_").lower() or "x"
    if name[0].isdigit() or keyword.iskeyword(name) or hasattr(builtins, name) or name in ("torch", "f", "reference"):
        return f"{name}_" if not name[0].isdigit() else f"x{name}"
    return name


def _fresh(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _arguments(node: Node, call: Sequence[Any], writer: _Writer) -> tuple[tuple[str, ...], dict[str, str]]:
    if node.op == "call_method" and node.target == "type_as":
        return (_source(node.args[0], call[1][0], writer), str(writer.region.facts.values[node].dtype)), {}
    args = [_source(value, shape, writer) for value, shape in zip(node.args, call[1], strict=True)]
    kwargs = {key: _source(node.kwargs[key], shape, writer) for key, shape in call[2].items()}
    constant = constant_name(node)
    if constant is not None:
        position, name = constant
        value: Any = node.kwargs[position] if isinstance(position, str) else node.args[position]
        name = _constant(name, value, writer)
        if isinstance(position, str):
            kwargs[position] = name
        else:
            args[position] = name
    return tuple(args), kwargs


def _constant(name: str, value: Scalar, writer: _Writer) -> str:
    taken = {*writer.constants, *writer.names.values()}
    if writer.constants.get(name) == value:
        return name
    name = _fresh(name, taken)
    writer.constants[name] = value
    return name


def constant_name(node: Node) -> tuple[int | str, str] | None:
    """Which argument of an operation is a constant with a name of its own, and the name."""
    name = getattr(node.target, "__name__", str(node.target))
    if name in ("layer_norm", "group_norm", "rms_norm", "batch_norm", "native_layer_norm"):
        place = {"layer_norm": 4, "group_norm": 4, "rms_norm": 3, "batch_norm": 7}.get(name)
        if "eps" in node.kwargs:
            return ("eps", "eps") if isinstance(node.kwargs["eps"], float) else None
        if place is not None and len(node.args) > place and isinstance(node.args[place], float):
            return (place, "eps")
        return None
    if name == "add" and len(node.args) == 2 and _feeds_a_root(node):
        for position, value in enumerate(node.args):
            if isinstance(value, float) and 0.0 < value < 1e-2:
                return (position, "eps")
    return None


def _feeds_a_root(node: Node) -> bool:
    return any(getattr(user.target, "__name__", user.target) in ("rsqrt", "sqrt", "pow") for user in node.users)


def _source(value: Any, shape: Any, writer: _Writer) -> str:
    """One argument as Python. `shape` is the same argument in the pattern, where a varying number is a string."""
    if isinstance(shape, str) and shape.startswith("="):
        return writer.expression(shape)
    if isinstance(value, Node):
        return writer.names[value] if value in writer.names else repr(shape)
    if isinstance(value, slice):
        parts = [
            _source(part, each, writer)
            for part, each in zip((value.start, value.stop, value.step), shape[1:], strict=True)
        ]
        return f"slice({', '.join(parts)})"
    if isinstance(value, (list, tuple)):
        parts = [_source(part, each, writer) for part, each in zip(value, shape[1:], strict=True)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, torch.device) or shape == ["device"]:
        return f"{writer.names[writer.region.inputs[0]]}.device"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value) if value is not Ellipsis else "..."


def _statement(node: Node, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    named = [f"{key}={value}" for key, value in kwargs.items()]
    if node.op == "call_method":
        method = "to" if node.target == "type_as" else str(node.target)
        return f"{_operand(args[0])}.{method}({', '.join([*args[1:], *named])})"
    function = node.target
    if function in INFIX and len(args) == 2 and not named:
        return f"{args[0]} {INFIX[function]} {args[1]}"
    if function is operator.getitem:
        return f"{_operand(args[0])}[{_index(args[1])}]"
    if function is operator.neg:
        return f"-{args[0]}"
    if function is operator.invert:
        return f"~{args[0]}"
    if function is getattr:
        return f"{args[0]}.{node.args[1]}"
    return f"{function_name(function)}({', '.join([*args, *named])})"


def _operand(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _index(text: str) -> str:
    """An index as people write it: `(..., slice(8, None, None))` as `..., 8:`."""
    value = ast.parse(text, mode="eval").body
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return ", ".join(_index_part(part) for part in parts)


def _index_part(part: ast.expr) -> str:
    if not (isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "slice"):
        return ast.unparse(part)
    start, stop, step = ("" if _is_none(piece) else ast.unparse(piece) for piece in part.args)
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _is_none(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value is None


def function_name(function: Any) -> str:
    """How to write a function with `torch` and `F` imported."""
    name = getattr(function, "__name__", "")
    if getattr(F, name, None) is function:
        return f"F.{name}"
    if getattr(torch, name, None) is function:
        return f"torch.{name}"
    if isinstance(function, torch._ops.OpOverload):  # noqa: SLF001 - its public name is under torch.ops
        return f"torch.ops.{function!s}"
    if getattr(torch.Tensor, name, None) is function:
        return f"torch.Tensor.{name}"
    module = getattr(function, "__module__", None) or ""
    if module == "_operator":
        return f"torch.{name}" if hasattr(torch, name) else name
    return f"{module}.{name}"


def canonical_op(node: Node) -> str:
    """The operation's canonical name (`harness.records.OpNode`)."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = name.split(".")[0] if isinstance(node.target, torch._ops.OpOverload) else name  # noqa: SLF001
    return CANONICAL.get(name, name)


def _op_node(node: Node, name: str, args: Sequence[str], kwargs: Mapping[str, str], region: Region) -> OpNode:
    tensor = region.facts.tensor(node)
    operation = canonical_op(node)
    if node.op == "call_method" and node.target in CAST_METHODS:
        args = (*args, f"torch.{CAST_METHODS[str(node.target)]}")
    return OpNode(
        name,
        operation,
        tuple(args),
        tuple(kwargs.items()),
        None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        None if tensor is None else tuple(int(size) for size in tensor.shape),
    )

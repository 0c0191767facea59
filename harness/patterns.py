"""The structure of a region as comparable text, and the matching of a region against a target's structure.

A pattern is JSON: `inputs` and `outputs` as [dtype, sizes, strides], `nodes` as [operation, arguments, keywords] in
canonical order. References are ["n", index] and ["i", index]. A number that varies with the batch or the sequence is
a string: "=S", "=256*S", "=B*S" (a coefficient times symbols). Strides of dimensions of size one are null.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from harness.facts import GraphFacts, hint
from harness.partition import data_inputs

Pattern = dict[str, Any]


def canonical_order(
    members: frozenset[Node], outputs: Sequence[Node], facts: GraphFacts
) -> tuple[list[Node], list[Node]]:
    """The region's nodes in depth-first order from its outputs, and what they read from outside.

    Inputs come by rank, higher first, and then by first use: an activation before its weight before its bias.
    """
    order: dict[Node, None] = {}
    inputs: dict[Node, None] = {}
    for output in outputs:
        stack = [(output, False)]
        while stack:
            node, ready = stack.pop()
            if node in order or node in inputs:
                continue
            if node not in members:
                if facts.tensor(node) is not None:
                    inputs[node] = None
                continue
            if ready:
                order[node] = None
                continue
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(data_inputs(node)))
    ranked = sorted(inputs, key=lambda node: -facts.values[node].dim())
    return list(order), ranked


def raw_pattern(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node], facts: GraphFacts) -> Pattern:
    """The pattern of one region with the numbers it has here (integers, or symbolic integers in a dynamic graph)."""
    names: dict[Node, list[Any]] = {node: ["i", index] for index, node in enumerate(inputs)}
    names.update({node: ["n", index] for index, node in enumerate(nodes)})
    return {
        "inputs": [_tensor(facts.values[node]) for node in inputs],
        "nodes": [_call(node, names, facts) for node in nodes],
        "outputs": [[*_tensor(facts.values[node]), names[node][1]] for node in outputs],
    }


def _tensor(tensor: torch.Tensor) -> list[Any]:
    sizes = list(tensor.shape)
    strides = [None if hint(size) == 1 else stride for size, stride in zip(sizes, tensor.stride(), strict=True)]
    return [str(tensor.dtype).removeprefix("torch."), sizes, strides]


def _call(node: Node, names: Mapping[Node, list[Any]], facts: GraphFacts) -> list[Any]:
    if node.op == "call_method" and node.target == "type_as":
        dtype = str(facts.values[node].dtype)
        return ["to", [_argument(node.args[0], names, facts), ["dtype", dtype]], {}]
    operation = node.target if isinstance(node.target, str) else qualified_name(node.target)
    arguments = [_argument(argument, names, facts) for argument in node.args]
    keywords = {key: _argument(value, names, facts) for key, value in sorted(node.kwargs.items())}
    return [operation, arguments, keywords]


def qualified_name(function: Any) -> str:
    """A function by module and name; operators of `operator` by their bare name."""
    module = getattr(function, "__module__", None) or "torch"
    name = getattr(function, "__name__", None) or str(function)
    return name if module == "_operator" else f"{module}.{name}"


def _argument(value: Any, names: Mapping[Node, list[Any]], facts: GraphFacts) -> Any:
    """One argument as JSON; numbers stay as they are."""
    if isinstance(value, Node):
        if value in names:
            return names[value]
        known = facts.values.get(value)
        return known if isinstance(known, (int, torch.SymInt)) else ["outside", type(known).__name__]
    if isinstance(value, (list, tuple)):
        return ["list", *(_argument(item, names, facts) for item in value)]
    if isinstance(value, slice):
        return ["slice", *(_argument(part, names, facts) for part in (value.start, value.stop, value.step))]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, torch.device):
        return ["device"]
    if value is None or isinstance(value, (bool, int, float, torch.SymInt)):
        return value
    if isinstance(value, str):
        return ["device"] if value.split(":")[0] in ("cpu", "cuda", "hip", "xpu", "mps") else ["text", value]
    return ["text", str(value)]


def pattern_text(pattern: Pattern) -> str:
    """One line, equal for equal patterns; raises TypeError when a symbolic number is left."""
    return json.dumps(pattern, separators=(",", ":"), sort_keys=True, default=_symbol_text)


def _symbol_text(value: Any) -> str:
    if isinstance(value, torch.SymInt):
        return f"?{value}"
    raise TypeError(f"a pattern cannot hold {type(value).__name__}")


def unify(pattern: Any, found: Any) -> dict[str, Any] | None:
    """The sizes of the pattern's symbols that make it equal to a raw pattern, or None.

    Symbols are bound where they stand alone in the sizes of the inputs; everything else must then agree.
    """
    bindings: dict[str, Any] = {}
    if len(pattern["inputs"]) != len(found["inputs"]):
        return None
    for expected, real in zip(pattern["inputs"], found["inputs"], strict=True):
        if len(expected[1]) != len(real[1]):
            return None
        for size, value in zip(expected[1], real[1], strict=True):
            if isinstance(size, str) and size[1:].isidentifier():
                bindings.setdefault(size[1:], value)
    same_tensors = all(_agree_tensors(pattern[side], found[side], bindings) for side in ("inputs", "outputs"))
    return bindings if same_tensors and _agree(pattern["nodes"], found["nodes"], bindings) else None


def _agree_tensors(expected: Any, real: Any, bindings: Mapping[str, Any]) -> bool:
    """[dtype, sizes, strides, ...] of every tensor; the stride of a dimension of size one means nothing."""
    if len(expected) != len(real):
        return False
    for one, other in zip(expected, real, strict=True):
        if not _agree([one[0], one[1], *one[3:]], [other[0], other[1], *other[3:]], bindings):
            return False
        strides = zip(one[2], other[2], strict=True)
        if not all(stride is None or found is None or _agree(stride, found, bindings) for stride, found in strides):
            return False
    return True


def _agree(expected: Any, real: Any, bindings: Mapping[str, Any]) -> bool:
    if isinstance(expected, str) and expected.startswith("="):
        value = evaluate(expected, bindings)
        return value is not None and isinstance(real, (int, torch.SymInt)) and same(value, real)
    if isinstance(expected, dict):
        return (
            isinstance(real, dict)
            and expected.keys() == real.keys()
            and all(_agree(expected[key], real[key], bindings) for key in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(real, list)
            and len(expected) == len(real)
            and all(_agree(one, other, bindings) for one, other in zip(expected, real, strict=True))
        )
    if isinstance(real, torch.SymInt):
        return isinstance(expected, int) and same(expected, real)
    return type(expected) is type(real) and bool(expected == real)


def same(one: Any, other: Any) -> bool:
    """Whether two sizes are surely equal; symbolic ones add no guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(one == other))


def evaluate(expression: str, bindings: Mapping[str, Any]) -> Any:
    """The value of "=256*B*S", or None when a symbol is not bound."""
    value: Any = 1
    for factor in expression[1:].split("*"):
        if factor.isdigit():
            value = value * int(factor)
        elif factor in bindings:
            value = value * bindings[factor]
        else:
            return None
    return value

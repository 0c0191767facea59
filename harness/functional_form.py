"""Writes in-place operations on a graph's own intermediates as their out-of-place forms, where that changes nothing.

`y = x * 2; y.relu_(); y += x` is how people save memory; to a compiler it is `add(relu(mul(x, 2)), x)`, and so it is to
regions after this. A write stays where its memory belongs to an input, a parameter or a buffer, where another view of
that memory is read later, and where the out-of-place form would give another dtype or layout.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from harness.facts import GraphFacts

OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)


def write_out_of_place(graph: Graph, facts: GraphFacts) -> list[Node]:
    """Rewrite what can be; the rewritten nodes. `facts` are of the graph before, and out of date afterwards."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    storages = dict(facts.storages)
    rewritten = [
        node
        for node in list(graph.nodes)
        if node in facts.mutators and node not in facts.random and _rewrite(node, facts, storages, position)
    ]
    graph.lint()
    return rewritten


def _rewrite(node: Node, facts: GraphFacts, storages: dict[Node, frozenset[int]], position: dict[Node, int]) -> bool:
    base = node.args[0] if node.args else None
    written = storages.get(node, frozenset())
    if not isinstance(base, Node) or storages.get(base) != written or len(written) != 1:
        return False
    form = _out_of_place(node)
    if form is None or not _is_private(node, base, written, storages, position):
        return False
    target, kwargs = form
    if not _same_result(node, target, kwargs, facts):
        return False
    node.target, node.kwargs = target, kwargs
    for user in [user for user in base.users if position[user] > position[node]]:
        user.replace_input_with(base, node)
    fresh = frozenset({-1 - position[node]})
    for other, held in storages.items():
        if position[other] >= position[node] and held & written:
            storages[other] = (held - written) | fresh
    return True


def _out_of_place(node: Node) -> tuple[Any, dict[str, Any]] | None:
    """Target and keywords of the same operation that leaves its argument alone, or None when it is not known."""
    kwargs = dict(node.kwargs)
    if node.op == "call_method":
        name = str(node.target)
        plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
        return (plain, kwargs) if plain and hasattr(torch.Tensor, plain) else None
    if node.target in OPERATORS:
        return OPERATORS[node.target], kwargs
    if kwargs.get("inplace") is True:
        return node.target, {**kwargs, "inplace": False}
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or not name.endswith("_") or name.endswith("__"):
        return None
    for place in (torch, torch.nn.functional):
        if getattr(place, name, None) is node.target and callable(getattr(place, name[:-1], None)):
            return getattr(place, name[:-1]), kwargs
    return None


def _is_private(
    node: Node,
    base: Node,
    written: frozenset[int],
    storages: dict[Node, frozenset[int]],
    position: dict[Node, int],
) -> bool:
    """Whether nobody else can see the write: the memory is an intermediate's, and no other view of it is read later."""
    here = position[node]
    for other, held in storages.items():
        if other in (node, base) or not held & written:
            continue
        if other.op in ("placeholder", "get_attr"):
            return False
        if position[other] < here and any(position[user] > here for user in other.users):
            return False
    return base.op in ("call_function", "call_method")


def _same_result(node: Node, target: Any, kwargs: dict[str, Any], facts: GraphFacts) -> bool:
    """Whether the out-of-place form gives the same shape, strides and dtype."""
    value = facts.values.get(node)
    if not isinstance(value, FakeTensor):
        return False
    args, given = map_arg((node.args, kwargs), lambda each: facts.values[each])
    try:
        with torch.no_grad(), value.fake_mode:
            result = getattr(args[0], target)(*args[1:], **given) if isinstance(target, str) else target(*args, **given)
    except FAILURES:
        return False
    return isinstance(result, torch.Tensor) and _look(result) == _look(value)


def _look(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype, value.device

"""Recognises written-out attention in an op graph, and writes the region again around one call for it."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.records import OpNode, Target

PRODUCTS = ("matmul", "bmm")
CASTS = ("to", "float", "type_as", "half", "bfloat16", "contiguous", "dropout")
SWAPS = {("-2", "-1"), ("-1", "-2"), ("2", "3"), ("3", "2")}


@dataclass(frozen=True)
class Attention:
    """Written-out attention in a graph: which nodes are its operands, and the last node that the call replaces."""

    queries: str
    keys: str  # [..., length, dim], before the transpose
    values: str
    scale: str
    masks: tuple[str, ...]  # Python source of additive or boolean masks
    result: str
    covered: frozenset[str]


def find_attention(target: Target) -> Attention | None:
    """Product, scale, mask, softmax over the last dim, product; None when the region is no such thing."""
    nodes = {node.name: node for node in target.graph}
    softmaxes = [node for node in target.graph if node.op == "softmax"]
    if len(softmaxes) != 1 or dict(softmaxes[0].kwargs).get("dim", _argument(softmaxes[0], 1)) != "-1":
        return None
    covered = {softmaxes[0].name}
    last = _product_after(target, softmaxes[0], covered)
    if last is None:
        return None
    scores = _Scores(nodes)
    if not scores.follow(softmaxes[0].args[0]):
        return None
    product = nodes[scores.product]
    keys = nodes.get(product.args[1])
    if keys is None or keys.op != "transpose" or tuple(keys.args[1:3]) not in SWAPS:
        return None
    covered |= scores.covered | {keys.name}
    scale = " * ".join(scores.factors) if scores.factors else "1.0"
    return Attention(
        queries=product.args[0],
        keys=keys.args[0],
        values=last.args[1],
        scale=scale,
        masks=tuple(scores.masks),
        result=last.name,
        covered=frozenset(covered | {last.name}),
    )


def _argument(node: OpNode, place: int) -> str | None:
    return node.args[place] if len(node.args) > place else None


def _product_after(target: Target, softmax: OpNode, covered: set[str]) -> OpNode | None:
    """The product that the weights go into, through casts alone."""
    current = softmax.name
    while True:
        users = [node for node in target.graph if current in node.args]
        if len(users) != 1 or current in target.results:
            return None
        user = users[0]
        covered.add(user.name)
        if user.op in PRODUCTS:
            return user if user.args[0] == current else None
        if user.op not in CASTS or user.args[0] != current:
            return None
        current = user.name


class _Scores:
    """Walks from the softmax's argument back to the first product, collecting scale factors and masks."""

    def __init__(self, nodes: Mapping[str, OpNode]) -> None:
        self.nodes = nodes
        self.factors: list[str] = []
        self.masks: list[str] = []
        self.covered: set[str] = set()
        self.product = ""

    def follow(self, name: str) -> bool:
        """Whether the chain is understood down to a product."""
        while name in self.nodes:
            node = self.nodes[name]
            self.covered.add(name)
            if node.op in PRODUCTS:
                self.product = name
                return True
            if not self._step(node):
                return False
            name = node.args[0]
        return False

    def _step(self, node: OpNode) -> bool:
        if node.op in CASTS:
            return True
        if node.op in ("mul", "div", "truediv") and _is_number(node.args[1]):
            self.factors.append(node.args[1] if node.op == "mul" else f"(1.0 / {node.args[1]})")
            return True
        if node.op == "add" and not node.kwargs and not _is_number(node.args[1]) and not self.factors:
            self.masks.append(node.args[1])
            return True
        if node.op == "masked_fill" and node.args[2] in ('float("-inf")', "-inf") and not self.factors:
            self.masks.append(self._kept(node.args[1]))
            return True
        return False

    def _kept(self, mask: str) -> str:
        """The complement of a mask: what attention may look at."""
        inner = self.nodes.get(mask)
        if inner is not None and inner.op in ("invert", "bitwise_not", "logical_not"):
            self.covered.add(mask)
            return inner.args[0]
        return f"~{mask}"


def _is_number(source: str) -> bool:
    try:
        return isinstance(ast.literal_eval(source), int | float)
    except (ValueError, SyntaxError):
        return False


def statements(target: Target) -> dict[str, str]:
    """The reference's own statement for each node."""
    function = next(node for node in ast.parse(target.reference).body if isinstance(node, ast.FunctionDef))
    found: dict[str, str] = {}
    for statement in function.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found[statement.targets[0].id] = ast.unparse(statement)
    return found


def live_statements(target: Target, found: Attention, call: str) -> list[str]:
    """The body of a function that computes the region with `call` for the attention; what nothing needs is left out."""
    written = statements(target)
    lines = [
        (node.name, f"{node.name} = {call}" if node.name == found.result else written[node.name])
        for node in target.graph
        if node.name == found.result or node.name not in found.covered
    ]
    needed, kept = set(target.results), []
    for name, line in reversed(lines):
        if name in needed:
            kept.append(line)
            needed |= set(re.findall(r"[A-Za-z_]\w*", line.split("=", 1)[1]))
    returned = ", ".join(target.results)
    return [*reversed(kept), f"return {returned}"]


def ungrouped(target: Target, name: str) -> str:
    """Keys or values before heads were repeated for grouped queries, as Python source; `name` when none were."""
    nodes = {node.name: node for node in target.graph}
    node, swap = nodes.get(name), ""
    if node is not None and node.op == "transpose" and node.args[1:3] in (("1", "2"), ("2", "1")):
        node, swap = nodes.get(node.args[0]), ".transpose(1, 2)"
    if node is None or node.op not in ("reshape", "flatten"):
        return name
    expand = nodes.get(node.args[0])
    unsqueeze = nodes.get(expand.args[0]) if expand is not None and expand.op == "expand" else None
    if unsqueeze is None or not _adds_after_heads(unsqueeze, 3 if swap else 2):
        return name
    return f"{unsqueeze.args[0]}{swap}"


def _adds_after_heads(node: OpNode, place: int) -> bool:
    if node.op == "unsqueeze":
        return node.args[1] == str(place)
    if node.op != "getitem":
        return False
    try:
        index = ast.parse(node.args[1], mode="eval").body
    except SyntaxError:
        return False
    entries = index.elts if isinstance(index, ast.Tuple) else [index]
    nones = [number for number, entry in enumerate(entries) if isinstance(entry, ast.Constant) and entry.value is None]
    return nones == [place]

"""Library variants: written-out attention as one fused call of PyTorch, the rest of the region as it was."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.proposers.playbook.cpp_file import signature
from agent.proposers.playbook.ideas import Idea
from agent.records import Brief
from harness.records import OpNode, Target

PRODUCTS = ("matmul", "bmm")
CASTS = ("to", "float", "type_as", "half", "bfloat16", "contiguous", "dropout")
SWAPS = {("-2", "-1"), ("-1", "-2"), ("2", "3"), ("3", "2")}

TEMPLATE = '''"""{title}: one call of PyTorch's fused attention instead of product, softmax and product."""

import torch
import torch.nn.functional as F

DTYPES = {dtypes}


def kernel_fn({signature}):
{body}
'''


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


def ideas(brief: Brief) -> Iterator[Idea]:
    """Whole files that call the library's own fused operator."""
    found = find_attention(brief.target)
    if found is not None and len(found.masks) <= 1:
        yield Idea(
            tactic="library sdpa",
            backend="library",
            source=_sdpa_file(brief.target, found),
            description="written-out attention as one scaled_dot_product_attention call",
            hypothesis="the fused call never writes the scores to memory",
        )


def find_attention(target: Target) -> Attention | None:
    """Product, scale and mask in any order, softmax over the last dim, product; None when the region is no such thing."""
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


def _sdpa_file(target: Target, found: Attention) -> str:
    lines = []
    written = statements(target)
    mask = f", attn_mask={found.masks[0]}" if found.masks else ""
    call = f"F.scaled_dot_product_attention({found.queries}, {found.keys}, {found.values}{mask}, scale={found.scale})"
    for node in target.graph:
        if node.name == found.result:
            lines.append(f"{node.name} = {call}")
        elif node.name not in found.covered:
            lines.append(written[node.name])
    returned = ", ".join(target.results)
    dtypes = sorted({spec.dtype for spec in target.inputs[:3]})
    return TEMPLATE.format(
        title=target.title.replace('"', "'"),
        dtypes=repr(dtypes).replace("'", '"'),
        signature=signature(target),
        body="\n".join(f"    {line}" for line in [*lines, f"return {returned}"]),
    )

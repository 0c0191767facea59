"""Says which region each statement of generated code belongs to, from the node names written above it.

A fused loop that covers several regions is divided by the bytes that their named operations write; a library call
belongs to the last of its names that a region owns, the earlier ones being what feeds it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.capture import CapturedGraph
from harness.facts import hint, is_heavy_op
from harness.instrument import Statement
from harness.partition import Family
from harness.regions import Region

FUSED = re.compile(r"\b(cpp|triton)_\w*fused")
HEAVY_IN_LOOP = 0.25  # a look-up or a bias inside a loop of other work is the lesser part of it


@dataclass(frozen=True)
class Owner:
    """What owns a node of a graph: a region, and what the node writes there."""

    region: Region
    bytes: int
    is_view: bool


def owners_of(graph: CapturedGraph) -> dict[str, Owner]:
    """Every node name of a graph that belongs to a region."""
    owned: dict[str, Owner] = {}
    for region in graph.regions:
        for node in region.nodes:
            tensor = region.facts.tensor(node)
            size = 0 if tensor is None else hint(tensor.numel()) * tensor.element_size()
            owned[node.name] = Owner(region, max(size, 1), region.facts.aliases_inputs(node))
    return owned


def reasons_of(graph: CapturedGraph) -> dict[str, str]:
    """Every node name of a graph that is in no region, and why: "dropout: it draws random numbers"."""
    return {
        node.name: f"{getattr(node.target, '__name__', node.target)}: {left.reason}"
        for left in graph.left_out
        for node in left.nodes
    }


def shares_of(statement: Statement, owned: Mapping[str, Owner]) -> list[tuple[Region, float]]:
    """The regions of a statement with their parts, which sum to one; empty when no region owns any of its names."""
    named = [owned[name] for name in statement.names if name in owned]
    if not named:
        return []
    if not FUSED.search(statement.text) or "triton_tem" in statement.text:
        return [(_of_library_call(statement, named), 1.0)]
    working = [owner for owner in named if not owner.is_view and _is_in_loop(owner, statement)]
    if not working:
        return [(named[-1].region, 1.0)]
    weights: dict[int, float] = {}
    regions: dict[int, Region] = {}
    for owner in working:
        regions[id(owner.region)] = owner.region
        weight = owner.bytes * (HEAVY_IN_LOOP if owner.region.family is Family.HEAVY else 1.0)
        weights[id(owner.region)] = weights.get(id(owner.region), 0.0) + weight
    total = sum(weights.values())
    return [(regions[key], weight / total) for key, weight in weights.items()]


def _of_library_call(statement: Statement, named: Sequence[Owner]) -> Region:
    if "scaled_dot_product" in statement.text:
        for owner in reversed(named):
            if owner.region.family is Family.ATTENTION or _runs(owner.region, "attention"):
                return owner.region
    return named[-1].region


def _runs(region: Region, stem: str) -> bool:
    return any(stem in name for name in region.facts.ops.get(region.nodes[0], ()))


def _is_in_loop(owner: Owner, statement: Statement) -> bool:
    """A heavy operation is in a fused loop only when the loop's own name says so (a look-up, a decomposed product)."""
    if owner.region.family is not Family.HEAVY:
        return True
    heavy = [name for name in owner.region.facts.ops.get(owner.region.nodes[0], ()) if is_heavy_op(name)]
    return any(re.search(rf"_{name}(_|\b)", statement.text) for name in heavy)

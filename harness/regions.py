"""The replaceable regions of a captured graph, and whether a region is an instance of a target.

    find_regions(gm) -> list[Region]         regions in graph order, disjoint
    survey(gm) -> Survey                     the same, with what is in no region and why
    match(target, region) -> dict | None     the sizes of `target`'s symbols in this region, or None
    structural_key(region) -> str            equal for regions that compute the same thing on equally laid out inputs

Both the profiler (on the graph Dynamo hands out) and the splicer (inside an Inductor pre-grad pass) call these, so
that they see the same regions. What a caller may rely on:

- `Region.inputs` are tensors from outside, in the order of the target's arguments; `Region.outputs` are nodes of the
  region, in the order of the target's results. Only outputs are read from outside. A region is convex: no path
  leaves and re-enters it. Its nodes need not be neighbours in the graph, so whoever replaces it re-sorts.
- Nothing in a region mutates, is random, runs under autocast, or touches memory that anything in the graph mutates;
  no output shares memory with an input or with another output.
- Views at the border stay outside. A view that is needed inside and read outside as well is duplicated in the graph
  by `find_regions` (views are free), operations that nothing reads are erased, and in-place operations on a graph's own
  intermediates are written out of place (`harness.functional_form`); it changes its argument no further.
- Heavy operations (products, convolutions, fused attention, look-ups) stand alone. Written-out attention is one region.
- `x.type_as(y)` depends on y's dtype alone: y is not an input.

Does not protect against a custom operator whose schema hides a mutation.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node

from harness.borders import settle_borders
from harness.facts import GraphFacts, graph_facts, switches_context, tensors_of
from harness.functional_form import write_out_of_place
from harness.fusions import fusion_groups
from harness.partition import Family, Flow, Group, groups_of, why_left_out
from harness.patterns import Pattern, canonical_order, pattern_text, raw_pattern, unify
from harness.records import Target

__all__ = ["Family", "LeftOut", "Region", "Survey", "find_regions", "match", "structural_key", "survey"]


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that one kernel could compute; nodes in a canonical execution order."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    family: Family
    facts: GraphFacts = field(repr=False)
    parts: tuple["Region", ...] = ()  # the regions of the disjoint cover that a fusion is made of

    @cached_property
    def pattern(self) -> Pattern:
        """The region's structure with the sizes it has in this graph."""
        return raw_pattern(self.nodes, self.inputs, self.outputs, self.facts)

    @property
    def module(self) -> str:
        """The module most of the region's operations come from, such as "layers.3.attention_norm"."""
        return module_of(self.nodes)[0]


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Operations that are in no region, and why."""

    nodes: tuple[Node, ...]
    reason: str

    @property
    def module(self) -> str:
        """The module most of the operations come from."""
        return module_of(self.nodes)[0]


@dataclass(frozen=True, eq=False)
class Survey:
    """A whole graph: its regions, and what is in none. Views and what computes no tensor are in neither."""

    regions: list[Region]
    left_out: list[LeftOut]
    facts: GraphFacts = field(repr=False)
    fusions: list[Region] = field(default_factory=list)  # of those regions, overlapping each other


def find_regions(gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> list[Region]:
    """All regions of a graph, in graph order.

    `example_inputs` are needed only where placeholders carry neither "example_value" nor "val". Raises ValueError
    naming such a placeholder. Changes `gm` no more than said above.
    """
    return survey(gm, example_inputs).regions


def find_replaceable(gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> list[Region]:
    """What a kernel may stand for: the fusions and then the disjoint regions; otherwise as `find_regions`."""
    found = survey(gm, example_inputs)
    return [*found.fusions, *found.regions]


def survey(gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> Survey:
    """The regions of a graph and what had to be left out; otherwise as `find_regions`."""
    facts = _facts_out_of_place(gm, example_inputs)
    _erase_unread(gm.graph, facts)
    flow, groups = groups_of(gm.graph, facts)
    left_out = [
        LeftOut((node,), reason)
        for node in flow.nodes
        if computes(node, flow) and (reason := why_left_out(node, facts))
    ]
    regions: list[Region] = []
    whole: dict[int, Region] = {}
    for group in groups:
        found = _region(gm, flow, group)
        if isinstance(found, Region):
            regions.append(found)
            whole[id(group)] = found
        else:
            left_out.append(LeftOut(tuple(sorted(group.nodes, key=lambda node: flow.position[node])), found))
    regions.sort(key=lambda region: min(flow.position.get(node, 0) for node in region.outputs))
    return Survey(regions, left_out, facts, _fusions(gm, groups, whole, facts))


def _fusions(
    gm: GraphModule, groups: Sequence[Group], regions: Mapping[int, Region], facts: GraphFacts
) -> list[Region]:
    """Regions made of several, found on the graph as it is now, and changing nothing in it."""
    flow = Flow(gm.graph, facts)  # anew: views may have been duplicated
    found = []
    for group, parts in fusion_groups(flow, [group for group in groups if id(group) in regions]):
        region = _region(gm, flow, group, may_copy=False)
        if isinstance(region, Region):
            found.append(replace(region, parts=tuple(regions[id(part)] for part in parts)))
    return found


def _facts_out_of_place(gm: GraphModule, example_inputs: Sequence[Any] | None) -> GraphFacts:
    """The facts of a graph after its own intermediates are no longer written to in place."""
    facts = graph_facts(gm, example_inputs)
    if not facts.mutators or not write_out_of_place(gm.graph, facts):
        return facts
    facts = graph_facts(gm, example_inputs)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and "example_value" in node.meta:
            node.meta["example_value"] = facts.values[node]  # whose memory is its own now
    return facts


def _erase_unread(graph: Graph, facts: GraphFacts) -> None:
    """Erase operations that nothing reads and that do nothing else: the compiler would, and no region must hold one."""
    for node in reversed(list(graph.nodes)):
        if node.users or isinstance(node.target, HigherOrderOperator):
            continue
        pure = node not in facts.mutators and node not in facts.random and node not in facts.foreign
        if pure and facts.ops[node] and tensors_of(facts.values[node]) and not switches_context(node):
            graph.erase_node(node)


def computes(node: Node, flow: Flow) -> bool:
    """Whether a node is an operation that makes or changes tensors, and no mere view."""
    if node.op not in ("call_function", "call_method") or flow.is_view(node):
        return False
    return node in flow.facts.mutators or bool(flow.facts.ops[node])


def _region(gm: GraphModule, flow: Flow, group: Group, *, may_copy: bool = True) -> Region | str:
    """The region of a group, or why it cannot be one."""
    borders = settle_borders(gm.graph, flow, group, may_copy=may_copy)
    if borders is None:
        unread = not any(flow.users(node) for node in group.nodes)
        return "nothing reads its result" if unread else "a tuple of tensors leaves it whole"
    nodes, inputs = canonical_order(borders.members, borders.outputs, flow.facts)
    if not inputs:
        return "it reads no tensor: a constant table"
    reason = _why_not_separate(nodes, inputs, borders.outputs, flow.facts)
    if reason:
        return reason
    if group.family is Family.ATTENTION:
        inputs = _queries_keys_values_first(nodes, inputs)
    return Region(tuple(nodes), tuple(inputs), borders.outputs, group.family, flow.facts)


def _why_not_separate(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node], facts: GraphFacts) -> str:
    """Why a region is not one: an output shares memory with an input or another output, or it is on two devices."""
    if not nodes:
        return "it computes nothing"
    taken = [facts.storages[node] for node in inputs]
    for output in outputs:
        if any(facts.storages[output] & other for other in taken):
            return "a result shares memory with an input or with another result"
        taken.append(facts.storages[output])
    devices = {str(facts.values[node].device) for node in (*inputs, *outputs)}
    return "" if len(devices) == 1 else f"it spans several devices ({', '.join(sorted(devices))})"


def _queries_keys_values_first(nodes: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """Written-out attention takes queries, keys, values and then the rest (mask, bias), however it was written."""
    products = [node for node in nodes if getattr(node.target, "__name__", node.target) in ("matmul", "bmm", "baddbmm")]
    leading: dict[Node, None] = {}
    for product in products:
        for argument in product.all_input_nodes[-2:]:
            source = _outside_source(argument, set(nodes), set(inputs))
            if source is not None:
                leading[source] = None
    return [*leading, *(node for node in inputs if node not in leading)]


def _outside_source(node: Node, inside: set[Node], inputs: set[Node]) -> Node | None:
    """The single input that a chain of one-argument operations leads to, or None."""
    while node in inside:
        arguments = node.all_input_nodes
        if len(arguments) != 1:
            return None
        node = arguments[0]
    return node if node in inputs else None


def structural_key(region: Region) -> str:
    """Text that is equal for regions with the same operations, arguments, constants, dtypes, shapes, strides, sharing,
    live outputs and argument order; any difference in `dim=`, eps or a stride shows."""
    return pattern_text(region.pattern)


def match(target: Target, region: Region) -> Mapping[str, Any] | None:
    """The size of each of the target's symbols in this region (symbolic in a dynamic graph), or None.

    Operations, constants, dtypes, fixed sizes and strides must be equal; sizes, strides and shape arguments that vary
    must agree on the symbols.
    """
    bindings = unify(json.loads(target.key), region.pattern)
    if bindings is None or len(target.inputs) != len(region.inputs):
        return None
    for spec, node in zip(target.inputs, region.inputs, strict=True):
        for name, size in zip(spec.dims, region.facts.values[node].shape, strict=True):
            if isinstance(name, str):
                bindings.setdefault(name, size)
    return bindings


def module_of(nodes: Sequence[Node]) -> tuple[str, str]:
    """The innermost module most of the nodes come from, as (path, class name); empty strings at the top level."""
    votes: dict[tuple[str, str], int] = {}
    for node in nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        place = _module_name(*stack[-1][:2]) if stack else ("", "")
        votes[place] = votes.get(place, 0) + 1
    return max(votes, key=lambda place: votes[place]) if votes else ("", "")


def _module_name(path: str, kind: Any) -> tuple[str, str]:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    steps = re.sub(r"\['([^']*)'\]|\[(\d+)\]", r".\1\2", path.removeprefix("L").replace("._modules", "")).split(".")
    return ".".join(_without_root(steps)), name.rsplit(".", 1)[-1]


def _without_root(steps: list[str]) -> list[str]:
    """The path below the compiled module: Dynamo calls the module itself L['self'] or L['args'][0]."""
    steps = [step for step in steps if step]
    if steps[:2] == ["args", "0"]:
        return steps[2:]
    return steps[1:] if steps[:1] in (["self"], ["fn"]) else steps

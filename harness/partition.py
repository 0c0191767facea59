"""Divides a captured graph into disjoint convex groups: heavy operations alone, written-out attention, light ones.

Views are not members here: data flow is seen through them (`Flow`). Joining is only along producer and consumer, so
unrelated nodes never meet. Time is near linear: a join is checked by a backward walk that cannot leave the index range
of the groups concerned.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from harness.facts import GraphFacts, hint

COPY_OPS = frozenset({"clone", "_unsafe_view", "view", "device", "expand", "transpose", "permute", "unsqueeze"})
PRODUCTS = frozenset({"bmm", "mm", "baddbmm"})
SCORE_CHAIN_LIMIT = 16


class Family(StrEnum):
    """How a region came about."""

    HEAVY = "heavy"
    ATTENTION = "attention"
    LIGHT = "light"
    FUSION = "fusion"  # of whole regions, beside the disjoint cover (harness/fusions.py)


@dataclass(eq=False)
class Group:
    """A growing region: compute nodes only. `first` and `last` are graph positions."""

    family: Family
    nodes: set[Node]
    first: int
    last: int
    parametric: bool
    context: int
    sources: set[Node] = field(default_factory=set)


class Flow:
    """The data flow of a graph between compute nodes, views seen through."""

    def __init__(self, graph: Graph, facts: GraphFacts) -> None:
        self.facts = facts
        self.nodes = list(graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self._sources: dict[Node, tuple[Node, ...]] = {}
        self._users: dict[Node, tuple[Node, ...]] = {}
        self._views = {node for node in self.nodes if self._aliases(node)}
        self._parametric: set[Node] = set()
        for node in self.nodes:
            if is_parameter(node) or any(source in self._parametric for source in node.all_input_nodes):
                self._parametric.add(node)

    def _aliases(self, node: Node) -> bool:
        facts = self.facts
        called = node.op in ("call_function", "call_method") and node not in facts.transformed
        return called and node not in facts.mutators and node not in facts.heavy and facts.aliases_inputs(node)

    def is_view(self, node: Node) -> bool:
        """Whether the node's result is a view of an argument."""
        return node in self._views

    def is_parametric(self, node: Node) -> bool:
        """Whether the node depends on a parameter of the model (else: tables and masks, shared by all layers)."""
        return node in self._parametric

    def sources(self, node: Node) -> tuple[Node, ...]:
        """The compute nodes and placeholders that a node reads, views seen through, without repetition."""
        if node not in self._sources:
            found: dict[Node, None] = {}
            for argument in data_inputs(node):
                found.update(dict.fromkeys(self.sources(argument) if self.is_view(argument) else (argument,)))
            self._sources[node] = tuple(found)
        return self._sources[node]

    def users(self, node: Node) -> tuple[Node, ...]:
        """The compute nodes (and the graph's output) that read a node, views seen through."""
        if node not in self._users:
            found: dict[Node, None] = {}
            for user in node.users:
                if node not in data_inputs(user):
                    continue
                found.update(dict.fromkeys(self.users(user) if self.is_view(user) else (user,)))
            self._users[node] = tuple(found)
        return self._users[node]


def data_inputs(node: Node) -> tuple[Node, ...]:
    """The nodes whose values (not just dtype) a node reads, in argument order."""
    if node.op == "call_method" and node.target == "type_as":
        first = node.args[0]
        return (first,) if isinstance(first, Node) else ()
    return tuple(node.all_input_nodes)


def is_parameter(node: Node) -> bool:
    """Whether a placeholder or attribute is a parameter of the model."""
    if node.op not in ("placeholder", "get_attr"):
        return False
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.nn.Parameter) or "_parameters_" in node.name


def groups_of(graph: Graph, facts: GraphFacts) -> tuple[Flow, list[Group]]:
    """All groups of a graph, in graph order."""
    flow = Flow(graph, facts)
    eligible = {node for node in flow.nodes if is_eligible(node, facts) and not flow.is_view(node)}
    owner: dict[Node, Group] = {}
    for nodes in attention_groups(flow, eligible):
        if not any(node in owner for node in nodes):
            _own(owner, _new_group(Family.ATTENTION, nodes, flow))
    for node in flow.nodes:
        if node in eligible and node not in owner:
            if node in facts.heavy:
                _own(owner, _new_group(Family.HEAVY, {node}, flow))
            else:
                _join(node, owner, flow)
    _sink_tables(owner, flow)
    return flow, sorted(set(owner.values()), key=lambda group: group.last)


def is_eligible(node: Node, facts: GraphFacts) -> bool:
    """Whether a node may be in a region at all (see the safety rules in `harness.regions`)."""
    return not why_left_out(node, facts)


def why_left_out(node: Node, facts: GraphFacts) -> str:
    """Why a node may be in no region, or ""."""
    if node.op not in ("call_function", "call_method"):
        return "it is no operation"
    if isinstance(node.target, HigherOrderOperator):
        return f"{node.target.name()} holds a graph of its own"
    for marked, reason in (
        (facts.mutators, "it writes to a tensor in place"),
        (facts.random, "it draws random numbers"),
        (facts.autocast, "it runs under autocast"),
        (facts.transformed, "it runs inside a functorch transform (vmap or grad)"),
    ):
        if node in marked:
            return reason
    if node in facts.foreign:
        return f"{facts.foreign[node]} is an operator of another library: a reference would not run alone"
    leaves = _leaves(facts.values.get(node))
    if not leaves:
        return "its result is no tensor"
    if any(leaf.layout is not torch.strided for leaf in leaves):
        return "its result is not a strided tensor"
    touched = set(facts.storages.get(node, ()))
    for source in node.all_input_nodes:
        touched |= facts.storages.get(source, frozenset())
    return "" if touched.isdisjoint(facts.mutated) else "it reads memory that the graph writes to in place"


def _leaves(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)) and value and all(isinstance(leaf, torch.Tensor) for leaf in value):
        return list(value)
    return []


def _new_group(family: Family, nodes: set[Node], flow: Flow) -> Group:
    places = [flow.position[node] for node in nodes]
    some = next(iter(nodes))
    group = Group(
        family, nodes, min(places), max(places), any(map(flow.is_parametric, nodes)), flow.facts.context.get(some, 0)
    )
    group.sources = {source for node in nodes for source in flow.sources(node)} - nodes
    return group


def _own(owner: dict[Node, Group], group: Group) -> None:
    for node in group.nodes:
        owner[node] = group


def _join(node: Node, owner: dict[Node, Group], flow: Flow) -> None:
    """Put a light node with those of its producers' groups that stay convex, one after the other."""
    group = _new_group(Family.LIGHT, {node}, flow)
    for source in flow.sources(node):
        producer = owner.get(source)
        if producer is None or producer is group or producer.family is not Family.LIGHT:
            continue
        if (producer.parametric, producer.context) != (group.parametric, group.context):
            continue
        if _is_convex(producer, group, owner, flow):
            group = _merged(producer, group)
            _own(owner, group)
    _own(owner, group)


def _merged(first: Group, second: Group) -> Group:
    nodes = first.nodes | second.nodes
    return Group(
        first.family,
        nodes,
        min(first.first, second.first),
        max(first.last, second.last),
        first.parametric,
        first.context,
        (first.sources | second.sources) - nodes,
    )


def joined(parts: Sequence[Group], owner: Mapping[Node, Group], flow: Flow) -> Group | None:
    """The groups as one; None where that would not be convex, every other group counting as one node."""
    if len({part.context for part in parts}) != 1:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole = _merged(whole, part)
    whole.family = Family.FUSION
    inside = {id(part) for part in parts}
    others = {node: group for node, group in owner.items() if id(group) not in inside}
    return whole if _is_convex(whole, whole, others, flow) else None


def _is_convex(first: Group, second: Group, owner: Mapping[Node, Group], flow: Flow) -> bool:
    """Whether no path leaves the union and comes back, every other group counting as one node."""
    union = first.nodes | second.nodes
    floor = min(first.first, second.first)
    pending = list((first.sources | second.sources) - union)
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        other = owner.get(node)
        members: Iterable[Node] = (node,)
        sources: Iterable[Node] = flow.sources(node)
        last = flow.position[node]
        if other is not None:
            members, sources, last = other.nodes, other.sources, other.last
        seen.update(members)
        if last < floor:
            continue
        for source in sources:
            if source in union:
                return False
            if source not in seen:
                pending.append(source)
    return True


def _sink_tables(owner: dict[Node, Group], flow: Flow) -> None:
    """A table or mask that a single parametric region reads belongs to that region."""
    for group in sorted(set(owner.values()), key=lambda item: -item.last):
        if group.parametric or group.family is not Family.LIGHT:
            continue
        readers = {user for node in group.nodes for user in flow.users(node)} - group.nodes
        homes = {owner.get(user) for user in readers}
        home = next(iter(homes)) if len(homes) == 1 else None
        if home is None or home.family is Family.HEAVY or not home.parametric or home.context != group.context:
            continue
        _own(owner, _merged(home, group))


def attention_groups(flow: Flow, eligible: set[Node]) -> Iterator[set[Node]]:
    """Written-out attention: product, scale and mask, softmax, product, with the copies that only it reads."""
    for node in flow.nodes:
        if node in eligible and node not in flow.facts.heavy and "_softmax" in flow.facts.ops[node]:
            scores = _scores(node, flow, eligible)
            mixed = _mixed(node, flow, eligible)
            if scores and mixed:
                nodes = {node, *scores, *mixed}
                _absorb_copies(nodes, flow, eligible)
                yield nodes


def _size(node: Node, flow: Flow) -> int:
    tensor = flow.facts.tensor(node)
    return -1 if tensor is None else hint(tensor.numel())


def _is_product(node: Node, flow: Flow, eligible: set[Node]) -> bool:
    tensor = flow.facts.tensor(node)
    return (
        node in eligible
        and tensor is not None
        and tensor.dim() >= 3
        and not PRODUCTS.isdisjoint(flow.facts.ops[node])
        and not any("attention" in name for name in flow.facts.ops[node])
    )


def _scores(softmax: Node, flow: Flow, eligible: set[Node]) -> list[Node]:
    """From the softmax up to the product: nodes of equal size that nothing else reads; empty when it is none."""
    chain: list[Node] = []
    reader = softmax
    while len(chain) < SCORE_CHAIN_LIMIT:
        links = [
            source
            for source in flow.sources(reader)
            if source in eligible
            and _size(source, flow) == _size(softmax, flow)
            and flow.users(source) == (reader,)
            and flow.is_parametric(source) == flow.is_parametric(reader)
        ]
        if not links:
            return []
        reader = next((link for link in links if _is_product(link, flow, eligible)), links[0])
        chain.append(reader)
        if _is_product(reader, flow, eligible):
            return chain
        if reader in flow.facts.heavy:
            return []
    return []


def _mixed(softmax: Node, flow: Flow, eligible: set[Node]) -> list[Node]:
    """From the softmax down to the product with the values; empty when it is none."""
    chain: list[Node] = []
    writer = softmax
    while len(chain) < SCORE_CHAIN_LIMIT:
        users = flow.users(writer)
        if len(users) != 1 or users[0] not in eligible:
            return []
        reader = users[0]
        chain.append(reader)
        if _is_product(reader, flow, eligible):
            return chain
        if reader in flow.facts.heavy or _size(reader, flow) != _size(softmax, flow):
            return []
        writer = reader
    return []


def _is_copy(node: Node, flow: Flow) -> bool:
    ops = set(flow.facts.ops[node])
    return bool(ops) and ops <= COPY_OPS and "clone" in ops


def _absorb_copies(nodes: set[Node], flow: Flow, eligible: set[Node]) -> None:
    """Take in repeated keys and values before the products, and the reordering copy after the last one."""
    pending = list(nodes)
    while pending:
        for source in flow.sources(pending.pop()):
            if source in nodes or source not in eligible or not _is_copy(source, flow):
                continue
            if all(user in nodes for user in flow.users(source)):
                nodes.add(source)
                pending.append(source)
    last = max(nodes, key=lambda node: flow.position[node])
    users = flow.users(last)
    if len(users) == 1 and users[0] in eligible and _is_copy(users[0], flow):
        nodes.add(users[0])

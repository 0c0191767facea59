"""Settles where a group of compute nodes ends: which views are inside, what comes in, what goes out.

Views at the border stay outside, so that no output shares memory with an input, except where the tensor outside
would be awkward for a kernel: complex views of real data, and expanded (stride zero) operands.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from harness.facts import GraphFacts, hint
from harness.partition import Family, Flow, Group, data_inputs

TURNS = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "t", "mT", "expand", "unsqueeze"})


@dataclass(frozen=True)
class Borders:
    """The members of a region in graph order, and its outputs."""

    members: frozenset[Node]
    outputs: tuple[Node, ...]


def settle_borders(graph: Graph, flow: Flow, group: Group, *, may_copy: bool = True) -> Borders | None:
    """The region of a group, views included; None when it cannot be one (a tuple leaves it, or nothing does).

    Duplicates in `graph` the views that are needed inside and read outside as well; None instead, unless `may_copy`.
    """
    views = _inner_views(flow, group)
    outputs: list[Node] = []
    for node in sorted(group.nodes, key=lambda item: flow.position[item]):
        if not _leaves(node, group, flow):
            continue
        found = _output_of(node, group, views, flow)
        if found is None:
            return None
        outputs.extend(found)
    if not outputs:
        return None
    kept = set(outputs)
    if not may_copy and _shared(group.nodes, views, kept):
        return None
    members = _separate(graph, flow, group.nodes, views, kept)
    return Borders(frozenset(members), tuple(outputs))


def _inner_views(flow: Flow, group: Group) -> set[Node]:
    """The views on the way between two members, and those that must not be left outside."""
    inner: set[Node] = set()
    pending = list(group.nodes)
    while pending:
        for argument in data_inputs(pending.pop()):
            if not flow.is_view(argument) or argument in inner:
                continue
            taken = _needed_views(argument, flow, group)
            pending.extend(view for view in taken if view not in inner)
            inner.update(taken)
    if group.family is Family.LIGHT:
        inner |= _overlapping_views(flow, group, inner)
    return inner


def _overlapping_views(flow: Flow, group: Group, inner: set[Node]) -> set[Node]:
    """Views of one tensor that come in side by side (its halves, say): the tensor itself is the better input."""
    members = group.nodes | inner
    border: dict[Node, None] = {}
    for node in members:
        border.update((argument, None) for argument in data_inputs(node) if argument not in members)
    lines = {node: _line(node, flow) for node in border}
    taken: set[Node] = set()
    for node, line in lines.items():
        others = {step for other, steps in lines.items() if other is not node for step in steps}
        shared = next(
            (i for i, step in enumerate(line) if step in others and flow.facts.tensor(step) is not None), None
        )
        if shared:
            taken.update(line[:shared])
    return taken


def _line(node: Node, flow: Flow) -> list[Node]:
    """A border tensor, the views it came by, and at last what owns the memory."""
    if not flow.is_view(node):
        return [node]
    chain = _chain(node, flow)
    source = _aliased(chain[-1], flow)
    return [*chain, source] if source is not None else chain


def _needed_views(argument: Node, flow: Flow, group: Group) -> list[Node]:
    """The views above `argument` that belong inside, the nearest first."""
    chain = _chain(argument, flow)
    top = chain[-1]
    source = _aliased(top, flow)
    if source in group.nodes:
        return chain
    depth = 0
    for index, view in enumerate(chain):
        if _must_be_inside(view, flow):
            depth = index + 1
            if depth < len(chain) and _raises_rank(chain[depth], flow):
                depth += 1
        elif group.family is Family.ATTENTION and _turns(view) and index == depth:
            depth = index + 1
    return chain[:depth]


def _chain(argument: Node, flow: Flow) -> list[Node]:
    chain = [argument]
    while True:
        source = _aliased(chain[-1], flow)
        if source is None or not flow.is_view(source):
            return chain
        chain.append(source)


def _aliased(view: Node, flow: Flow) -> Node | None:
    """The argument whose memory a view shows."""
    own = flow.facts.storages[view]
    return next((source for source in data_inputs(view) if own & flow.facts.storages.get(source, frozenset())), None)


def _must_be_inside(view: Node, flow: Flow) -> bool:
    tensor, source = flow.facts.tensor(view), _aliased(view, flow)
    before = flow.facts.tensor(source) if source is not None else None
    if tensor is None or before is None:
        return False
    return (tensor.is_complex() and not before.is_complex()) or _is_expanded(tensor, before)


def _is_expanded(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return hint(tensor.numel()) * tensor.element_size() > hint(before.numel()) * before.element_size()


def _raises_rank(view: Node, flow: Flow) -> bool:
    tensor, source = flow.facts.tensor(view), _aliased(view, flow)
    before = flow.facts.tensor(source) if source is not None else None
    return tensor is not None and before is not None and tensor.dim() > before.dim()


def _turns(view: Node) -> bool:
    """Whether a view only reorders or inserts dimensions."""
    name = getattr(view.target, "__name__", str(view.target))
    if name == "getitem" and isinstance(view.args[1], tuple):
        return all(part is None or part == slice(None) for part in view.args[1])
    return name in TURNS


def _leaves(node: Node, group: Group, flow: Flow) -> bool:
    """Whether anything outside reads a node, itself or through a view."""
    pending = [user for user in node.users if node in data_inputs(user)]
    while pending:
        user = pending.pop()
        if user in group.nodes:
            continue
        if not flow.is_view(user):
            return True
        pending.extend(user.users)
    return False


def _output_of(node: Node, group: Group, views: set[Node], flow: Flow) -> list[Node] | None:
    """The tensors that leave for a compute node: itself, the parts of its tuple, or the real view of its complex."""
    tensor = flow.facts.tensor(node)
    if tensor is None:
        parts = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
        if len(parts) != len(node.users):
            return None
        leaving = [part for part in parts if _leaves(part, group, flow)]
        views.update(parts)
        return leaving
    if not tensor.is_complex():
        return [node]
    real = _only_view(node, flow)
    if real is None or flow.facts.values[real].is_complex():
        return [node]
    views.add(real)
    flat = _only_view(real, flow)
    if flat is None or flow.facts.values[flat].dim() >= flow.facts.values[real].dim():
        return [real]
    views.add(flat)
    return [flat]


def _only_view(node: Node, flow: Flow) -> Node | None:
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and flow.is_view(user) and flow.facts.tensor(user) is not None else None


def _separate(graph: Graph, flow: Flow, nodes: set[Node], views: set[Node], outputs: set[Node]) -> set[Node]:
    """Give the region copies of its views that others read too; returns the region's members."""
    inside = nodes | views
    shared = _shared(nodes, views, outputs)
    copies: dict[Node, Node] = {}
    for view in sorted(shared, key=lambda node: flow.position[node]):
        with graph.inserting_after(view):
            copies[view] = graph.node_copy(view, lambda node: copies.get(node, node))
        _copy_facts(flow.facts, view, copies[view])
    for view, copy in copies.items():
        for user in [user for user in view.users if user in inside and user not in shared]:
            user.replace_input_with(view, copy)
    return nodes | (views - shared) | set(copies.values())


def _shared(nodes: set[Node], views: set[Node], outputs: set[Node]) -> set[Node]:
    """The views of a region that others read too."""
    inside = nodes | views
    shared: set[Node] = set()
    pending = [view for view in views - outputs if any(user not in inside for user in view.users)]
    while pending:
        view = pending.pop()
        if view in shared:
            continue
        shared.add(view)
        pending.extend(source for source in view.all_input_nodes if source in views and source not in outputs)
    return shared


def _copy_facts(facts: GraphFacts, old: Node, new: Node) -> None:
    for table in (facts.values, facts.storages, facts.context, facts.ops):
        entries: dict[Node, object] = table  # type: ignore[assignment]
        entries[new] = entries[old]

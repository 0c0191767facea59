"""Puts kept kernels back into a model: ops spliced into its graphs by an Inductor pre-grad pass, the rest compiled.

Every replaced region is one that `harness.regions` calls safe and whose sizes lie in the kernel's verified domain;
anything else stays the original, compiled by Inductor, and is counted as a fallback. Does not protect against a
kernel that is wrong inside its domain: that is what the judge and `harness.verify` are for.
"""

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses import FakeTensor

from harness.facts import switches_context
from harness.kernel_op import TORCH_FAILURES, KernelOp
from harness.partition import is_parameter
from harness.records import Target

INTERLEAVED = "its inputs and users are interleaved with in-place operations or changes of context"
META_KEYS = ("example_value", "val")  # Dynamo's graphs, exported graphs


class RegionLike(Protocol):
    """What splicing needs of a region: its nodes in execution order, and its border in the target's order."""

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """The nodes to be replaced."""

    @property
    def inputs(self) -> Sequence[fx.Node]:
        """Nodes outside that it reads, in the order of `Target.inputs`."""

    @property
    def outputs(self) -> Sequence[fx.Node]:
        """Its nodes that others read, in the order of `Target.outputs`."""


@dataclass(frozen=True)
class Site:
    """A region whose inputs are the nodes that stand in the graph now, earlier replacements included."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


Finder = Callable[[fx.GraphModule], Sequence[Any]]  # of RegionLike
Matcher = Callable[[Target, Any], Mapping[str, Any] | None]


@dataclass
class SiteLog:
    """What the pass did to the graphs compiled so far: call sites per target id, and why a site fell back."""

    applied: dict[str, int] = field(default_factory=dict)
    fallback: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    graphs: int = 0

    def apply(self, target: Target) -> None:
        """Count one call site that runs the kernel."""
        self.applied[target.id] = self.applied.get(target.id, 0) + 1

    def refuse(self, target: Target, reason: str) -> None:
        """Count one call site that could have run the kernel and stays the original."""
        self.fallback[target.id] = self.fallback.get(target.id, 0) + 1
        line = f"{target.id}: {reason}"
        if line not in self.reasons:
            self.reasons.append(line)


@dataclass(eq=False)  # Dynamo compares backends, and so their passes, at every call: by identity, then
class Splicer:
    """The pre-grad pass of one model: replaces regions by ops, kernel by kernel.

    A fusion comes before its members, so that of two overlapping sites the larger one wins; among equals the caller's
    order counts. `find` and `match` are those of `harness.regions`.
    """

    ops: Sequence[KernelOp]
    find: Finder
    match: Matcher
    log: SiteLog = field(default_factory=SiteLog)

    def __call__(self, graph: fx.Graph) -> None:
        """Edit a graph that Dynamo captured, in place."""
        module = graph.owning_module
        self.log.graphs += 1
        if module is not None and self.ops:
            self._splice(graph, module)
        graph.lint()

    def _splice(self, graph: fx.Graph, module: fx.GraphModule) -> None:
        try:
            with no_python_dispatcher():  # its decompositions would show other aliases than the capture saw
                regions = list(self.find(module))
                candidates = self._matches(regions)
        except TORCH_FAILURES as error:
            self.log.reasons.append(f"a graph could not be taken apart: {type(error).__name__}: {error}")
            return  # the graph stays as it is; its sites count as fallbacks where they are counted per target
        forget_type_as(graph)
        taken: set[fx.Node] = set()
        writers = _writers(regions)
        standing: dict[fx.Node, fx.Node] = {}
        for op, region, bindings in candidates:
            if taken.isdisjoint(region.nodes) and self._try(graph, op, region, bindings, standing, writers):
                taken.update(region.nodes)
        self._count_lookalikes([region for region in regions if taken.isdisjoint(region.nodes)], candidates)

    def _count_lookalikes(self, left: Sequence[Any], candidates: Sequence[tuple[KernelOp, Any, Any]]) -> None:
        """Regions that do what a target does, in sizes or a layout that it was not verified for: they fell back."""
        tried = {id(region) for _, region, _ in candidates}
        for region in left:
            if id(region) in tried or not hasattr(region, "pattern"):
                continue
            calls = tuple(node[0] for node in region.pattern["nodes"])
            target = next((op.kernel.target for op in self.ops if _calls(op.kernel.target.key) == calls), None)
            if target is not None:
                self.log.refuse(target, "the same operations in sizes or a layout that were not verified")

    def _matches(self, regions: Sequence[RegionLike]) -> list[tuple[KernelOp, RegionLike, Mapping[str, int]]]:
        """All candidates in order of preference, found before the graph changes: patterns read the nodes' arguments.

        At some sizes two targets look alike (a table [1, S, D] and a batch of one); a site then belongs to the target
        that was captured there.
        """
        found = []
        for op in self.ops:
            for region in regions:
                bindings = self.match(op.kernel.target, region)
                if bindings is not None:
                    found.append((op, region, bindings))
        return sorted(found, key=lambda each: (not each[0].kernel.target.members, not _is_home(each[0], each[1])))

    def _try(
        self,
        graph: fx.Graph,
        op: KernelOp,
        region: RegionLike,
        bindings: Mapping[str, int],
        standing: dict[fx.Node, fx.Node],
        writers: AbstractSet[fx.Node],
    ) -> bool:
        """Replace one region unless something speaks against it; `standing` maps replaced outputs to their results."""
        target = op.kernel.target
        inputs = tuple(standing.get(node, node) for node in region.inputs)
        site = Site(tuple(region.nodes), inputs, tuple(region.outputs))
        reason = (
            outside_domain(target, bindings) or unsafe(site) or _unpackable(op, site) or _different_outputs(op, site)
        )
        order = None if reason else plan_order(graph, site, writers)
        if order is None:
            self.log.refuse(target, reason or INTERLEAVED)
            return False
        standing.update(zip(site.outputs, replace(graph, op, site, order), strict=True))
        self.log.apply(target)
        return True


@lru_cache(maxsize=1024)
def _calls(key: str) -> tuple[str, ...]:
    """The operations of a target's pattern, in order."""
    return tuple(node[0] for node in json.loads(key)["nodes"]) if key.startswith("{") else ()


def _is_home(op: KernelOp, region: RegionLike) -> bool:
    """Whether the op's target was captured at this region's place in the model."""
    return getattr(region, "module", "") in {site.module for site in op.kernel.target.call_sites}


def _writers(regions: Sequence[Any]) -> AbstractSet[fx.Node]:
    """The nodes that write to tensors, as whoever found the regions saw it."""
    facts = next((found for region in regions if (found := getattr(region, "facts", None)) is not None), None)
    return facts.mutators if facts is not None else frozenset()


def outside_domain(target: Target, bindings: Mapping[str, int]) -> str:
    """Why these sizes are not ones the kernel was verified for, or "".

    Fixed dims were compared by `match`; a named one must lie between the smallest and the largest size in
    `Target.bindings`, where the judge checked the kernel. Asked of a symbolic size, the comparison becomes a guard of
    the compiled graph: sizes on the other side of it are compiled, and decided, anew.
    """
    for name, size in bindings.items():
        known = [sizes[name] for sizes in target.bindings if name in sizes]
        if not known or not min(known) <= size <= max(known):
            verified = f"{min(known)}..{max(known)}" if known else "nothing"
            return f"size {name}={size} is outside what was verified ({verified})"
    return ""


def value_of(node: fx.Node) -> Any:
    """The fake value that the capture left on a node, or None."""
    return next((node.meta[key] for key in META_KEYS if key in node.meta), None)


def unsafe(region: Site) -> str:
    """Why replacing this region could change what the model means, or "": a second look after `find_regions`."""
    border = [value_of(node) for node in (*region.inputs, *region.outputs)]
    if not all(isinstance(value, torch.Tensor) for value in border):
        return "a border value is not a tensor"
    inside = set(region.nodes)
    readers = {node for node in region.nodes if any(user not in inside for user in node.users)}
    if not readers <= set(region.outputs):
        return "a value inside is read outside"
    if any(may_mutate(node) for node in region.nodes):
        return "it mutates a tensor"
    seen = {_storage(value) for value in border[: len(region.inputs)]}
    for value in border[len(region.inputs) :]:
        if _storage(value) in seen:
            return "an output shares memory with an input or another output"
        seen.add(_storage(value))
    return ""


def forget_type_as(graph: fx.Graph) -> None:
    """Write `x.type_as(y)` as `x.to(dtype)`: y is read for its dtype alone, and may be inside what is replaced."""
    for node in graph.nodes:
        value, source = value_of(node), value_of(node.args[0]) if node.target == "type_as" else None
        if isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and value.device == source.device:
            node.target, node.args = "to", (node.args[0], value.dtype)


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - the only identity a fake storage has


def is_fixed(node: fx.Node) -> bool:
    """Whether nothing may be moved across a node: it may write to a tensor, or changes how later nodes run."""
    return may_mutate(node) or switches_context(node)


def may_mutate(node: fx.Node) -> bool:
    """Whether a node may write to a tensor; unknown kinds count as yes."""
    if node.op in {"placeholder", "get_attr", "output"}:
        return False
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return True
    if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - FX targets are of this class
        return node.target._schema.is_mutable  # noqa: SLF001 - the schema has no public name
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001 - as above
        return True
    name = getattr(node.target, "__name__", str(node.target))
    in_place = (name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS) or name in _IN_PLACE
    return in_place or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))


_KEYWORDS = frozenset({"and_", "or_", "not_", "is_"})  # of `operator`: an underscore because Python has the bare word
_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"}) | {
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
}


def _unpackable(op: KernelOp, region: Site) -> str:
    """Why a kernel with `prepack` cannot stand here, or "": only the model's own parameters may be packed once."""
    places = op.packer.places if op.packer is not None else ()
    passing = [place for place in places if not _is_parameter(region.inputs[place])]
    return f"input {passing[0]} would be packed once, but is not a parameter of the model" if passing else ""


def _is_parameter(node: fx.Node) -> bool:
    """A parameter, or a view of one."""
    while node.op in {"call_method", "call_function"} and len(node.all_input_nodes) == 1:
        source, value = value_of(node.all_input_nodes[0]), value_of(node)
        if not (isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor)):
            return False
        if _storage(source) != _storage(value):
            return False
        node = node.all_input_nodes[0]
    return is_parameter(node)


def _different_outputs(op: KernelOp, region: Site) -> str:
    """Why the op would not return what the region returns here, in shape, dtype, device or stride, or ""."""
    inputs = [value_of(node) for node in region.inputs]
    expected = [value_of(node) for node in region.outputs]
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    if mode is None:
        return "the graph carries no fake values"
    try:
        with mode, torch.no_grad():
            result = op.inference(*inputs)
    except TORCH_FAILURES as error:
        return f"its original does not run on these inputs: {type(error).__name__}: {error}"
    given = [result] if isinstance(result, torch.Tensor) else list(result)
    for index, (mine, theirs) in enumerate(zip(given, expected, strict=True)):
        if _layout(mine) != _layout(theirs):
            return f"output {index} would be {_layout(mine)} where the model has {_layout(theirs)}"
    return ""


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    """Shape, strides of dims that have one, dtype and device."""
    strides = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    return tuple(value.shape), strides, value.dtype, str(value.device)


@dataclass(frozen=True)
class Order:
    """Where the op goes: before `before`, after `moved` has been moved behind it, in this order."""

    before: fx.Node
    moved: tuple[fx.Node, ...]


def plan_order(graph: fx.Graph, region: Site, writers: AbstractSet[fx.Node] = frozenset()) -> Order | None:
    """A place for the op after all inputs and before all users; None when only reordering a mutation would make one.

    A convex region may have an early user that stands before a late input. Such users (and what hangs on them) move
    behind the op, unless something in between may write to a tensor (`writers`: those that were seen to).
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    inside = set(region.nodes)
    users = {user for node in region.outputs for user in node.users if user not in inside}
    last_input = max((position[node] for node in region.inputs), default=-1)
    first_user = min((position[node] for node in users), default=len(position))
    nodes = list(graph.nodes)
    if first_user > last_input:
        return Order(nodes[first_user] if first_user < len(nodes) else region.nodes[-1], ())
    span = nodes[first_user : last_input + 1]
    if any(node in writers or is_fixed(node) for node in span if node not in inside):
        return None
    moving = set(users)
    for node in span:
        if any(source in moving for source in node.all_input_nodes):
            moving.add(node)
    if any(node in moving for node in region.inputs):
        return None  # not convex: an input depends on an output
    return Order(nodes[last_input + 1], tuple(node for node in span if node in moving and node not in inside))


def replace(graph: fx.Graph, op: KernelOp, region: Site, order: Order) -> list[fx.Node]:
    """Put the op in the region's place, erase the region, and give the nodes that stand for its outputs."""
    inside = set(region.nodes)
    values = [value_of(node) for node in region.outputs]
    target = op.training if _needs_gradient(region) else op.inference
    with graph.inserting_before(_outside(order.before, inside)):
        call = graph.call_function(target, tuple(region.inputs))
        results = [call]
        if len(values) > 1:
            results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(values))]
    call.meta = dict(region.outputs[0].meta)
    if len(values) > 1:
        call.meta["example_value"] = tuple(values)
    for old, new in zip(region.outputs, results, strict=True):
        new.meta = dict(old.meta) if new is not call or len(values) == 1 else new.meta
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    anchor = results[-1]
    for node in order.moved:
        anchor.append(node)
        anchor = node
    for node in reversed(region.nodes):
        graph.erase_node(node)
    return results


def _outside(node: fx.Node, inside: Iterable[fx.Node]) -> fx.Node:
    while node in inside:
        node = node.next
    return node


def _needs_gradient(region: Site) -> bool:
    return torch.is_grad_enabled() and any(value_of(node).requires_grad for node in region.inputs)

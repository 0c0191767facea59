"""Captures a model as torch-level graphs with TorchDynamo, at its own size and at a few others.

A backend of ours collects every graph (graph breaks give several) and finds its regions at once, while Dynamo's fake
values are alive. At other sizes nothing is computed: the graphs are traced and answered with zeros, so that a position
beyond a table cannot bring a GPU down.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from harness.errors import InputError
from harness.facts import GraphFacts, example_of
from harness.loading import LoadedModel, first_line
from harness.outputs import copied, like_original, restored
from harness.regions import LeftOut, Region, survey

MAX_CALLS_KEPT = 256


@dataclass
class CapturedGraph:
    """One graph, its regions, and the real arguments of every call of it in one forward."""

    module: GraphModule
    regions: list[Region]
    left_out: list[LeftOut]
    facts: GraphFacts
    names: tuple[str, ...]  # of all nodes, as Dynamo gave them
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fusions: list[Region] = field(default_factory=list)  # of its regions


@dataclass(frozen=True)
class Size:
    """A batch and a sequence size; None where the inputs have none."""

    batch: int | None
    length: int | None


@dataclass(frozen=True)
class Capture:
    """A model's graphs at its own size, and the regions of the same graphs at other sizes."""

    graphs: tuple[CapturedGraph, ...]
    sizes: tuple[Size, ...]  # the captured run's first
    others: tuple[tuple[CapturedGraph, ...], ...]  # one per further size, graphs in the same order
    notes: tuple[str, ...]


def capture(loaded: LoadedModel) -> Capture:
    """Capture a model. Raises InputError when Dynamo cannot trace any of it."""
    notes: list[str] = []
    graphs = _trace(loaded.model, loaded.args, loaded.kwargs, compute=True)
    if not graphs:
        raise InputError(f"TorchDynamo captured no graph of {loaded.name}: {_why_nothing(loaded.model)}")
    if len(graphs) > 1:
        notes.append(f"{len(graphs)} graphs: the model breaks capture {len(graphs) - 1} times")
    own = own_size(loaded.args, loaded.kwargs)
    sizes, others = [own], []
    for size in other_sizes(own):
        try:
            args, kwargs = resized((loaded.args, loaded.kwargs), own, size)
            found = _trace(loaded.model, args, kwargs, compute=False)
        except Exception as error:  # noqa: BLE001 - a model may refuse a size in any way; it stays at its own
            notes.append(f"batch {size.batch}, length {size.length} not captured: {first_line(error)[:160]}")
            continue
        if len(found) != len(graphs):
            notes.append(f"batch {size.batch}, length {size.length} traces to {len(found)} graphs; not compared")
            continue
        sizes.append(size)
        others.append(tuple(found))
        if len(others) == 2:
            break
    return Capture(tuple(graphs), tuple(sizes), tuple(others), tuple(notes))


def _why_nothing(model: nn.Module) -> str:
    recurrent = sorted({type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)})
    if recurrent:
        return f"it does not trace {', '.join(recurrent)}, nor a forward that calls them; give a part of the model"
    return "its forward runs no tensor operation that can be traced"


def _trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, compute: bool) -> list[CapturedGraph]:
    graphs: list[CapturedGraph] = []

    def backend(module: GraphModule, _example_inputs: list[Any]) -> Callable[..., Any]:
        names = tuple(node.name for node in module.graph.nodes)
        own = copy_of(module)
        found = survey(own)
        captured = CapturedGraph(own, found.regions, found.left_out, found.facts, names, fusions=found.fusions)
        own.recompile()
        graphs.append(captured)
        zeros = None if compute else _zero_maker(module.graph)

        def run(*inputs: Any) -> Any:
            if zeros is not None:
                return zeros()
            if len(captured.calls) < MAX_CALLS_KEPT:
                captured.calls.append(_as_given(captured, inputs))
            return module.forward(*inputs)

        return run

    torch._dynamo.reset()  # noqa: SLF001 - the public way to start afresh
    args, kwargs = copied((tuple(args), dict(kwargs)))
    with torch.no_grad(), restored(model), torch.random.fork_rng():
        torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
    torch._dynamo.reset()  # noqa: SLF001
    return graphs


def _as_given(graph: CapturedGraph, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """A call's arguments, those that it writes to as they are before."""
    facts = graph.facts
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    return tuple(
        like_original(value)
        if isinstance(value, torch.Tensor) and facts.storages.get(node, frozenset()) & facts.mutated
        else value
        for node, value in zip(placeholders, inputs, strict=True)
    )


def copy_of(module: GraphModule) -> GraphModule:
    """A module whose graph may be changed, sharing tensors and metadata with the original."""
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    return GraphModule(module, graph)


def _zero_maker(graph: Graph) -> Callable[[], Any]:
    """Zeros like the graph's outputs, made without running it."""
    output = next(node for node in graph.nodes if node.op == "output")
    fakes = torch.fx.node.map_arg(output.args[0], example_of)
    templates = torch.utils._pytree.tree_map(_template, fakes)  # noqa: SLF001 - torch's only tree mapping

    def make() -> Any:
        return torch.utils._pytree.tree_map(  # noqa: SLF001
            lambda leaf: leaf.zeros() if isinstance(leaf, _Template) else leaf, templates
        )

    return make


@dataclass(frozen=True)
class _Template:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _template(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Template(tuple(int(size) for size in value.shape), value.dtype, value.device)
    return value


def own_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Size:
    """The batch is the leading size that all tensors share; the length is the second size of integer inputs, or of
    floating ones of rank three."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]  # noqa: SLF001
    ranked = [tensor for tensor in tensors if tensor.dim() >= 1]
    leading = {tensor.shape[0] for tensor in ranked}
    batch = next(iter(leading)) if len(leading) == 1 else None
    lengths = {t.shape[1] for t in ranked if (t.dim() == 2 and not t.is_floating_point()) or t.dim() == 3}
    length = next(iter(lengths)) if len(lengths) == 1 and batch is not None else None
    return Size(batch, length)


def other_sizes(own: Size) -> list[Size]:
    """Sizes to try, the most telling first: both differ from the captured ones and from each other."""
    if own.batch is None:
        return []
    one, two = own.batch + 1, own.batch + 2
    if own.length is None or own.length < 8:
        return [Size(one, own.length), Size(two, own.length), Size(own.batch + 4, own.length)]
    shorter, longer, half = own.length * 3 // 4 - 1, own.length * 5 // 4 + 1, own.length // 2 + 3
    return [
        Size(one, shorter),
        Size(two, longer),
        Size(two, half),
        Size(own.batch, shorter),
        Size(own.batch, half),
        Size(one, own.length),
        Size(two, own.length),
    ]


def resized(inputs: Any, own: Size, size: Size) -> Any:
    """The inputs with their batch and length changed, contents repeated."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        if size.batch is not None and leaf.shape[0] == own.batch:
            leaf = _repeated(leaf, 0, size.batch)
        if size.length is not None and own.length is not None and leaf.dim() > 1 and leaf.shape[1] == own.length:
            leaf = _repeated(leaf, 1, size.length)
        return leaf

    return torch.utils._pytree.tree_map(change, inputs)  # noqa: SLF001


def _repeated(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, index)


class Replay(Interpreter):
    """Runs a captured graph on real inputs and shows every node's value to `watch`."""

    def __init__(self, module: GraphModule, watch: Callable[[Node, Any], None]) -> None:
        super().__init__(module)
        self.watch = watch

    def run_node(self, n: Node) -> Any:
        """The node's value, after it was shown."""
        value = super().run_node(n)
        self.watch(n, value)
        return value

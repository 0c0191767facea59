"""What every node of a captured graph is: its fake value, what it aliases, what is mutated, which aten ops it runs.

Found by running the graph once on fake tensors: aliases by storage, mutations by version counters and by the schemas of
the aten operators that really run, heavy and random operations by those operators, never by the spelling of a name.
Does not see through a custom operator whose schema lies about mutation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

HEAVY_STEMS = ("conv", "embedding", "attention", "lstm", "gru", "rnn_", "cdist")
HEAVY_OPS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "linear", "_scaled_mm", "_grouped_mm", "linear_backward"}
)
CONTEXT_SWITCHES = frozenset(
    {
        "_enter_autocast",
        "_exit_autocast",
        "_set_grad_enabled",
        "inference_mode",
        "_enter_inference_mode",
        "_exit_inference_mode",
    }
)
TRANSFORM_MODULES = ("torch._functorch", "torch._C._functorch")
OWN_NAMESPACES = frozenset({"aten", "prims", "prim", "quantized_decomposed"})  # operators that torch brings itself


@dataclass
class GraphFacts:
    """Facts of one graph. `storages` and `mutated` hold storage identities; `context` counts autocast and grad
    switches passed, so that nodes with different numbers must not be joined; `autocast` marks nodes under an enabled
    autocast, `transformed` those whose tensors a functorch transform wraps (vmap, grad), `foreign` those that run an
    operator that is not torch's own, by its name."""

    values: dict[Node, Any] = field(default_factory=dict)
    storages: dict[Node, frozenset[int]] = field(default_factory=dict)
    mutated: set[int] = field(default_factory=set)
    mutators: set[Node] = field(default_factory=set)
    heavy: set[Node] = field(default_factory=set)
    random: set[Node] = field(default_factory=set)
    autocast: set[Node] = field(default_factory=set)
    transformed: set[Node] = field(default_factory=set)
    foreign: dict[Node, str] = field(default_factory=dict)
    context: dict[Node, int] = field(default_factory=dict)
    ops: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    keep_alive: list[Any] = field(default_factory=list)

    def tensor(self, node: Node) -> torch.Tensor | None:
        """The node's fake tensor, or None when its value is no tensor."""
        value = self.values.get(node)
        return value if isinstance(value, torch.Tensor) else None

    def aliases_inputs(self, node: Node) -> bool:
        """Whether the node's result shares memory with one of its arguments (a view, or the argument itself)."""
        own = self.storages[node]
        return any(own & self.storages[source] for source in node.all_input_nodes if source in self.storages)


class _Recorder(TorchDispatchMode):
    """Collects the aten operators that run, and the storages that they say they write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.seen: list[Any] = []
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.seen.append(func)
        self.written.update(storage_id(tensor) for tensor in written_arguments(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def forget(self) -> None:
        """Start on the next node."""
        self.seen.clear()
        self.written.clear()


class _Propagation(Interpreter):
    """Runs the graph on fake tensors and writes down the facts."""

    def __init__(self, graph_module: GraphModule, facts: GraphFacts, recorder: _Recorder, fake: FakeTensorMode) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.facts, self.recorder, self.fake = facts, recorder, fake
        self.switches = 0
        self.autocast_depth = 0
        self.autocast_stack: list[bool] = []

    def run_node(self, n: Node) -> Any:
        facts = self.facts
        before = _versions(n, facts)
        self.recorder.forget()
        result = self._run(n)
        facts.values[n] = result
        facts.storages[n] = frozenset(storage_id(leaf) for leaf in tensors_of(result))
        facts.context[n] = self.switches
        if any(self.autocast_stack):
            facts.autocast.add(n)
        changed = {storage_id(tensor) for tensor, version in before if _version(tensor) != version}
        changed |= self.recorder.written & {storage_id(tensor) for tensor, _ in before}
        if changed:
            facts.mutators.add(n)
            facts.mutated |= changed
        if any(is_wrapped(leaf) for node in (n, *n.all_input_nodes) for leaf in tensors_of(facts.values.get(node))):
            facts.transformed.add(n)
        foreign = next((name for func in self.recorder.seen if (name := foreign_name(func))), "")
        if foreign:
            facts.foreign[n] = foreign
        names = tuple(op_name(func) for func in self.recorder.seen)
        facts.ops[n] = names
        if any(is_heavy_op(name) for name in names):
            facts.heavy.add(n)
        if any(_is_random(func, n) for func in self.recorder.seen):
            facts.random.add(n)
        return result

    def _run(self, n: Node) -> Any:
        name = getattr(n.target, "__name__", str(n.target))
        if switches_context(n):
            self.switches += 1
            if name == "_enter_autocast":
                self.autocast_stack.append(bool(n.args[2]) if len(n.args) > 2 else True)
            elif name == "_exit_autocast" and self.autocast_stack:
                self.autocast_stack.pop()
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor) and not isinstance(result, FakeTensor):
            return self.fake.from_tensor(result)
        return result


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What an operator writes to: by its schema, and running statistics, about which older schemas are silent."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    if "batch_norm" in str(schema.name) and (given.get("training") or given.get("train")):
        names |= {"running_mean", "running_var"}
    return [tensor for name in names for tensor in tensors_of(given.get(name))]


def _versions(node: Node, facts: GraphFacts) -> list[tuple[torch.Tensor, int]]:
    seen: list[tuple[torch.Tensor, int]] = []
    for source in node.all_input_nodes:
        seen.extend((tensor, _version(tensor)) for tensor in tensors_of(facts.values.get(source)))
    return seen


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - the public name of the counter


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, nested ones included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in tensors_of(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in tensors_of(item)]
    return []


def _is_random(func: Any, node: Node) -> bool:
    """Fused attention is tagged as random for its dropout; without dropout it is not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if "scaled_dot_product" not in op_name(func):
        return True
    dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return bool(dropout != 0.0)


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory; equal for views of one another. Valid while the facts are alive."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)  # noqa: SLF001 - functorch has no public name for it
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as torch's own alias analysis does


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch transform (vmap, grad) has wrapped the tensor: its shape is then not all of it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # noqa: SLF001 - as above


def switches_context(node: Node) -> bool:
    """Whether a node changes how later nodes run: autocast, gradient mode, the level of a functorch transform."""
    if node.op != "call_function":
        return False
    module = getattr(node.target, "__module__", None) or ""
    return getattr(node.target, "__name__", "") in CONTEXT_SWITCHES or module.startswith(TRANSFORM_MODULES)


def foreign_name(func: Any) -> str:
    """`library::op` for an operator that is not torch's own, else ""."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else ""  # noqa: SLF001 - the class has no public name
    return name if name and name.split("::")[0] not in OWN_NAMESPACES else ""


def op_name(func: Any) -> str:
    """`aten.add.Tensor` as "add"; other callables by their name."""
    packet = getattr(func, "overloadpacket", None)
    return str(getattr(packet or func, "__name__", func))


def is_heavy_op(name: str) -> bool:
    """Whether an aten operator is a product, convolution, attention or table look-up."""
    return name in HEAVY_OPS or any(stem in name for stem in HEAVY_STEMS)


def example_of(node: Node) -> Any:
    """The fake value that Dynamo or Inductor left on a placeholder, or None."""
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    return None


def graph_facts(graph_module: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphFacts:
    """Run the graph once on fake tensors.

    `example_inputs` are needed only where the placeholders carry no fake value. Raises ValueError naming a placeholder
    without one.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    found = list(example_inputs) if example_inputs is not None else [example_of(node) for node in placeholders]
    missing = [node.name for node, value in zip(placeholders, found, strict=True) if value is None]
    if missing:
        raise ValueError(f"placeholder {missing[0]} carries no example value; pass example_inputs")
    fake = _mode_of(found)
    inputs = [_faked(value, fake) for value in found]
    facts = GraphFacts()
    recorder = _Recorder()
    with torch.no_grad(), fake, _without_guards(fake), recorder:
        _Propagation(graph_module, facts, recorder, fake).run(*inputs)
    return facts


def _mode_of(values: Sequence[Any]) -> FakeTensorMode:
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _faked(value: Any, fake: FakeTensorMode) -> Any:
    if isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor):
        return value
    return fake.from_tensor(value)


def _without_guards(fake: FakeTensorMode) -> Any:
    """Running the graph again must not add guards to the caller's symbolic shapes."""
    environment = fake.shape_env
    return environment.suppress_guards() if environment is not None else nullcontext()


def hint(size: Any) -> int:
    """A size as the captured run had it; never adds a guard to a symbolic one."""
    if isinstance(size, int):
        return size
    known = getattr(getattr(size, "node", None), "hint", None)
    return int(known) if known is not None else -1


def map_nodes(argument: Any, function: Callable[[Node], Any]) -> Any:
    """`argument` with every node in it replaced."""
    return map_arg(argument, function)

"""The compiler behind an optimised model on a GPU: Inductor, its graphs played by harness.graph_player if they can be.

Which graphs can be is asked of the graph itself, run on fake tensors (harness.facts). What cannot be is left to
Inductor's own CUDA graphs, and said in `reasons`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from harness.facts import graph_facts
from harness.graph_player import GraphPlayer, Played
from harness.kernel_op import TORCH_FAILURES
from harness.partition import is_parameter


class Backend:
    """Compiles each graph that Dynamo hands over with Inductor's `options`; one per optimised model."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self.players: list[GraphPlayer] = []
        self.called: list[GraphPlayer] = []
        self.reasons: list[str] = []  # of the graphs that Inductor's own CUDA graphs run

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
        """The compiled graph, as a function of its flat inputs."""
        from torch._inductor.compile_fx import compile_fx

        reason, places = unplayable(graph), moving(graph)
        options = {**self._options, "triton.cudagraphs": bool(reason)}
        run: Any = compile_fx(graph, list(examples), config_patches=options)
        if reason:
            self.reasons.append(reason)
            return run
        player = GraphPlayer(run, places, self.called)
        self.players.append(player)
        return player


def moving(graph: fx.GraphModule) -> list[int]:
    """The places of a graph's inputs that are no parameters or buffers of the model."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [place for place, node in enumerate(inputs) if not (is_parameter(node) or "_buffers_" in node.name)]


def unplayable(graph: fx.GraphModule) -> str:
    """Why a recording would not mean what this graph means, or ""."""
    if torch.is_grad_enabled():
        return "gradients are on"
    try:
        facts = graph_facts(graph)
    except TORCH_FAILURES as error:
        return f"it could not be looked at: {type(error).__name__}"
    given = [node for node in graph.graph.nodes if node.op in {"placeholder", "get_attr"}]
    if any(facts.storages.get(node, frozenset()) & facts.mutated for node in given):
        return "it writes to a tensor that it is given"
    if facts.random:
        return "it draws random numbers"
    values = [facts.values.get(node) for node in given]
    if not all(value.is_cuda for value in values if isinstance(value, torch.Tensor)):
        return "it reads a tensor of the CPU"
    return ""


class Start:
    """A call whose graph can be launched before Dynamo's guards are asked: how arguments become its flat inputs.

    The guards are asked all the same, while the device works; when they say no, what was launched is dropped.
    """

    def __init__(self, player: GraphPlayer, played: Played, leaves: Sequence[Any]) -> None:
        """Raises LookupError when an input of the graph is no argument of the call."""
        self._player = player
        self._launched: Played | None = None
        self._looks = [_look(leaf) for leaf in leaves]
        where = {id(leaf): index for index, leaf in enumerate(leaves)}
        tensors = [(place, value) for place, value in enumerate(played.flat) if isinstance(value, torch.Tensor)]
        self._order = [(place, where[id(value)]) for place, value in tensors]
        # the arguments of the call that taught this are not kept alive
        flat = tuple(None if isinstance(value, torch.Tensor) else value for value in played.flat)
        self._played = Played(played.player, flat)

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether these arguments look like those of the call that this was learnt from."""
        return [_look(leaf) for leaf in leaves] == self._looks

    def launch(self, leaves: Sequence[Any]) -> bool:
        """Start the replay for these arguments."""
        flat = list(self._played.flat)
        for place, index in self._order:
            flat[place] = leaves[index]
        self._launched = Played(self._played.player, tuple(flat))
        return self._player.start(self._launched)

    def settle(self) -> bool:
        """After the call: whether what was launched was wanted; forgets it if not."""
        wanted = self._player.last is self._launched
        self._player.started = self._launched = None
        return wanted


def learnt(called: Sequence[GraphPlayer], leaves: Sequence[Any]) -> Start | None:
    """What the call just made teaches: its start, if it was one graph, played, of nothing but arguments and weights."""
    if len(called) != 1 or called[0].last is None:
        return None
    try:
        return Start(called[0], called[0].last, leaves)
    except LookupError:
        return None


def _look(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) is torch.Tensor:
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return (type(leaf), leaf)


def plain_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The arguments one after another, names included; None when one of them is more than a tensor or a scalar."""
    leaves = (*args, *(part for item in kwargs.items() for part in item)) if kwargs else args
    return leaves if all(leaf is None or isinstance(leaf, _PLAIN) for leaf in leaves) else None


_PLAIN = (torch.Tensor, int, float, str)

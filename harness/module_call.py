"""Calls an nn.Module as a pure function of its inputs and tensors.

This file's text stands in the references and kernel files made of KernelBench modules (`harness.kernelbench`), so it
imports torch alone. Swapping tensors in the modules' own tables costs some tenths of a µs each, where
`torch.func.functional_call` would add tens to what is timed as eager.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

GIVEN = "the next tensor"  # stands in `ModuleCall.arguments` for a tensor; anything else is passed as it is


class ModuleCall:
    """`model(*arguments)` with the tensors at `places` (dotted names of parameters and buffers) given anew."""

    def __init__(
        self, model: torch.nn.Module, places: Sequence[str], arguments: Sequence[Any], order: Sequence[int] = ()
    ) -> None:
        self.model = model
        self.places = tuple(places)
        self.arguments = tuple(arguments)
        self.count = sum(isinstance(value, str) and value == GIVEN for value in self.arguments)
        self.order = tuple(order) or tuple(range(len(self.places)))
        self._slots = [_slot(model, place) for place in self.places]
        self._recurrent = [part for part in model.modules() if isinstance(part, torch.nn.RNNBase)]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The output leaves for inputs and then weights: one tensor, or a tuple."""
        given = iter(tensors[: self.count])
        arguments = [next(given) if isinstance(value, str) and value == GIVEN else value for value in self.arguments]
        state = [tensors[self.count + index] for index in self.order]
        if torch.compiler.is_compiling():
            named = dict(zip(self.places, state, strict=True))
            result = torch.func.functional_call(self.model, named, tuple(arguments))
        else:
            self._put(state)
            result = self.model(*arguments)
        leaves = flat(result)
        return leaves[0] if len(leaves) == 1 else tuple(leaves)

    def _put(self, state: Sequence[torch.Tensor]) -> None:
        for (table, name), tensor in zip(self._slots, state, strict=True):
            table[name] = tensor
        for part in self._recurrent:
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]  # noqa: SLF001 - cuDNN's list


def _slot(model: torch.nn.Module, place: str) -> tuple[dict[str, Any], str]:
    path, _, name = place.rpartition(".")
    part = model.get_submodule(path)
    return (part._parameters if name in part._parameters else part._buffers), name  # noqa: SLF001 - the tables


def flat(result: Any) -> list[Any]:
    """The tensors of nested tuples, lists and dicts, in order; anything else is kept for the caller to refuse."""
    if isinstance(result, Mapping):
        return [leaf for value in result.values() for leaf in flat(value)]
    if isinstance(result, (tuple, list)):
        return [leaf for value in result for leaf in flat(value)]
    return [result]


def built(kind: Callable[..., torch.nn.Module], arguments: Any) -> torch.nn.Module:
    """The module as KernelBench builds it from `get_init_inputs()`, in eval mode, its plain tensors made buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if isinstance(arguments, Mapping):
            model = kind(**arguments)
        elif len(arguments) == 2 and isinstance(arguments[0], list) and isinstance(arguments[1], Mapping):
            model = kind(*arguments[0], **arguments[1])
        else:
            model = kind(*arguments)
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                delattr(part, name)
                part.register_buffer(name, value, persistent=False)
    return model.eval().requires_grad_(requires_grad=False)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a call depends on: parameters, then buffers; the batch counters of norms only matter to training."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value for name, value in named if not name.endswith("num_batches_tracked")}


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Floating tensors in `dtype`; integers, booleans and complex tables keep theirs."""
    model._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)  # noqa: SLF001 - as `to` does
    return model


def matched(model: torch.nn.Module, wanted: Sequence[tuple[str, Sequence[int]]]) -> tuple[list[str], list[int]]:
    """Which of the original's tensors (name, shape) each tensor of a rewritten module is: by name, else by order.

    Buffers of the rewritten module alone stay as they were built. Raises ValueError for a parameter without a match.
    """
    own, shapes = state_of(model), {name: tuple(shape) for name, shape in wanted}
    places = [name for name in own if name in shapes and tuple(own[name].shape) == shapes[name]]
    unknown = [name for name, _ in model.named_parameters() if name not in places]
    index = {name: number for number, (name, _) in enumerate(wanted)}
    left = [name for name, _ in wanted if name not in places]
    for name in unknown:
        if not left or tuple(own[name].shape) != shapes[left[0]]:
            theirs = ", ".join(f"{key} {list(value)}" for key, value in wanted) or "none"
            raise ValueError(
                f"its parameter {name} {list(own[name].shape)} is none of the original's ({theirs}): give it the same"
            )
        index[name] = index[left.pop(0)]
        places.append(name)
    return places, [index[name] for name in places]

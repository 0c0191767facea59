"""Inputs for a model from the user's function or from shapes, and how values are drawn (others: `derived_inputs`)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.errors import InputError

SEED = 1
ID_NAMES = ("input_ids", "tokens", "ids", "idx", "token_ids", "decoder_input_ids", "x_ids", "indices")


@dataclass(frozen=True)
class InputSet:
    """One set of inputs; `weight` is how much of the model's use it stands for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = "default"
    weight: float = 1.0


def given_inputs(
    function: Callable[..., Any], place: str, device: torch.device, dtype: torch.dtype
) -> Sequence[InputSet]:
    """Call the user's function, with (device, dtype) where it takes two arguments, and read what it returns.

    A tuple is positional, a dict keyword arguments, a list of {name, weight, args, kwargs} several sets. Floating
    tensors are cast, others only moved.
    """
    torch.manual_seed(SEED)
    try:
        value = function(device, dtype) if _takes_two(function) else function()
    except (Exception, SystemExit) as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{place} raised {type(error).__name__}: {line}; mend that function") from error
    return [_placed(item, device, dtype) for item in _sets(value, place)]


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) >= 2


def _sets(value: Any, place: str) -> list[InputSet]:
    if isinstance(value, torch.Tensor):
        return [InputSet((value,))]
    if isinstance(value, tuple):
        return [InputSet(value)]
    if isinstance(value, Mapping):
        return [InputSet((), dict(value))]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "args" in item for item in value):
        return [_named(item, index) for index, item in enumerate(value)]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "kwargs" in item for item in value):
        return [_named(item, index) for index, item in enumerate(value)]
    if isinstance(value, list):
        return [InputSet(tuple(value))]
    raise InputError(f"{place} returned a {type(value).__name__}; return a tuple of args, a dict of kwargs, or a list")


def _named(item: Mapping[str, Any], index: int) -> InputSet:
    return InputSet(
        tuple(item.get("args", ())),
        dict(item.get("kwargs", {})),
        str(item.get("name", index)),
        float(item.get("weight", 1.0)),
    )


def _placed(item: InputSet, device: torch.device, dtype: torch.dtype) -> InputSet:
    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(place(part) for part in value)
        if isinstance(value, dict):
            return {key: place(part) for key, part in value.items()}
        return value

    return InputSet(place(item.args), place(item.kwargs), item.name, item.weight)


def shaped_inputs(
    model: nn.Module, shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> InputSet:
    """Inputs of the given shapes, one per required parameter: ids where the model looks them up, floats otherwise."""
    names = required_parameters(model)
    if len(shapes) > max(len(names), 1) and not _is_open(model):
        raise InputError(
            f"{len(shapes)} --input-shape were given, but {type(model).__name__}.forward takes {len(names)}: "
            f"{', '.join(names)}"
        )
    if len(shapes) < len(names):
        raise InputError(
            f"{type(model).__name__}.forward needs {', '.join(names)}: give --input-shape once for each, or --inputs"
        )
    first = first_table(model)
    args = []
    for index, shape in enumerate(shapes):
        name = names[index] if index < len(names) else ""
        wants_ids = name in ID_NAMES or "ids" in name or (first is not None and index == 0)
        table = first if wants_ids else None
        args.append(_drawn(shape, table, device, dtype))
    return InputSet(tuple(args))


def _drawn(shape: Sequence[int], table: nn.Embedding | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    try:
        return random_floats(shape, device, dtype) if table is None else random_ids(shape, table.num_embeddings, device)
    except (RuntimeError, MemoryError) as error:  # torch's allocator says RuntimeError
        asked = ",".join(map(str, shape))
        raise InputError(f"--input-shape {asked} does not fit into this machine's memory; ask for less") from error


def _is_open(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(list(parameters)) > 1


def required_parameters(model: nn.Module) -> list[str]:
    """The parameters of `forward` without a default, or its first one when all have defaults."""
    parameters = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    required = [p.name for p in parameters if p.default is p.empty]
    return required or [p.name for p in parameters[:1]]


def first_table(model: nn.Module) -> nn.Embedding | None:
    """The table that token ids index: the first embedding, when it comes before any other weighted layer."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):  # noqa: SLF001 - the only common base class
            return None
    return None


def random_ids(shape: Sequence[int], limit: int, device: torch.device) -> torch.Tensor:
    """Ids from 0 to `limit` - 1."""
    return torch.randint(0, limit, tuple(shape), generator=torch.Generator().manual_seed(SEED)).to(device)


def random_floats(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(SEED)).to(device, dtype)

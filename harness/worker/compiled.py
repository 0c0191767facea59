"""`torch.compile` of a function, called as its compiled artefact, without Dynamo's guards where that is possible."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Kernel = Callable[..., Any]


def compiled(function: Kernel, tensors: list[torch.Tensor]) -> Kernel:
    """`torch.compile` of a function for these tensors, called without Dynamo's guards where that is possible."""
    from torch._inductor.compile_fx import compile_fx

    captured: list[Kernel] = []
    seen: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Kernel:
        artefact: Any = compile_fx(graph, examples)
        captured.append(artefact)

        def record(*args: Any) -> Any:
            results = artefact(*args)
            seen.update(args=args, results=results)
            return results

        return record

    torch.compiler.reset()
    guarded: Kernel = torch.compile(function, backend=backend, dynamic=False)
    result = guarded(*tensors)
    direct = _without_guards(captured, seen, tensors, result)
    return direct if direct is not None else guarded


def _without_guards(
    captured: list[Kernel], seen: dict[str, Any], tensors: list[torch.Tensor], result: Any
) -> Kernel | None:
    """The compiled artefact itself, its arguments and results put into the function's own order."""
    if len(captured) != 1 or not seen:
        return None
    order = [_index_of(argument, tensors) for argument in seen["args"]]
    results = list(seen["results"]) if isinstance(seen["results"], tuple | list) else [seen["results"]]
    leaves = list(result) if isinstance(result, tuple | list) else [result]
    places = [_index_of(leaf, results) for leaf in leaves]
    if None in order or None in places:
        return None
    artefact = captured[0]
    if isinstance(result, tuple | list):
        return lambda *args: tuple(_pick(artefact(*[args[index] for index in order]), places))  # type: ignore[index]
    return lambda *args: artefact(*[args[index] for index in order])[places[0]]  # type: ignore[index]


def _index_of(value: Any, values: Sequence[Any]) -> int | None:
    return next((index for index, other in enumerate(values) if other is value), None)


def _pick(values: Sequence[Any], places: list[int | None]) -> list[Any]:
    return [values[place] for place in places if place is not None]

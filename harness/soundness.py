"""Does the optimised model compute what the original computes? Two calls in a row on different values, leaf by leaf.

Compared are both outputs (the first one read after the second call), the inputs after the calls, and the buffers.
Random layers are compared with one seed and eager's generators. Does not cover training, or state that hides outside
the buffers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from harness.kernel_op import TORCH_FAILURES
from harness.outputs import Difference, Leaf, compare, copied, leaves, redrawn, restored
from harness.truth import in_float64

SEED = 7
SECOND_SEED = 11
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


def run_twice(function: Callable[..., Any], model: nn.Module, inputs: Inputs) -> list[Leaf]:
    """Everything observable of two calls of `function`, on copies of `inputs` and on other values of the same shapes.

    `model`'s buffers are restored.
    """
    with torch.no_grad(), restored(model), _seeded():
        first_args, first_kwargs = copied(inputs)
        second_args, second_kwargs = redrawn(inputs, SECOND_SEED)
        first = function(*first_args, **first_kwargs)
        second = function(*second_args, **second_kwargs)
        found = [*leaves(first, "first output"), *leaves(second, "second output")]
        found += leaves((first_args, first_kwargs, second_args, second_kwargs), "inputs")
        found += [(f"buffer {name}", buffer.clone()) for name, buffer in model.named_buffers()]
    return found


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        yield


def draws_random(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the eager forward uses torch's random generators."""
    with torch.no_grad(), restored(model), torch.random.fork_rng():
        before = _generator_states()
        args, kwargs = copied(inputs)
        model(*args, **kwargs)
        return not all(torch.equal(one, two) for one, two in zip(before, _generator_states(), strict=True))


def _generator_states() -> list[torch.Tensor]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]


@contextmanager
def eager_randomness(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Compile a random model with eager's generators, so that equal seeds give equal outputs; others as usual."""
    from torch._inductor import config

    with config.patch(fallback_random=True) if draws_random(model, inputs) else nullcontext():
        yield


def truth_of(model: nn.Module, inputs: Inputs) -> list[Leaf] | None:
    """The same in float64, dtype literals included, on a copy of the model; None when the model cannot run so."""
    tensors, others = _split(inputs)
    found: list[Leaf] = []

    def evaluate(*wide: torch.Tensor) -> list[torch.Tensor]:
        found.extend(run_twice(twin, twin, others(wide)))
        return []

    try:
        twin = copy.deepcopy(model).double()
        in_float64(evaluate, tensors, {})
    except TORCH_FAILURES:
        return None  # the caller falls back to a tolerance against eager, and says so
    return found


def _split(inputs: Inputs) -> tuple[list[torch.Tensor], Callable[[tuple[torch.Tensor, ...]], Inputs]]:
    flat, structure = pytree.tree_flatten(inputs)
    places = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: tuple[torch.Tensor, ...]) -> Inputs:
        mixed = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            mixed[place] = tensor
        rebuilt: Inputs = pytree.tree_unflatten(mixed, structure)
        return rebuilt

    return [flat[place] for place in places], rebuild


def check(ours: Callable[..., Any], model: nn.Module, inputs: Inputs) -> Difference:
    """`ours` against the eager `model`, judged by float64.

    Where it fails that, what plain torch.compile returns may stand for the original, if that itself agrees with eager:
    the compiler's liberties are not the kernels' fault.
    """
    original, truth = run_twice(model, model, inputs), truth_of(model, inputs)
    found = run_twice(ours, model, inputs)
    difference = compare(found, original, truth)
    if difference.ok:
        return difference
    compiled = run_twice(torch.compile(model, dynamic=False), model, inputs)
    if compare(compiled, original, None).ok and compare(found, compiled, truth).ok:
        return Difference(ok=True, max_error=difference.max_error, detail="as far from eager as torch.compile itself")
    return difference

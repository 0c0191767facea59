"""`optimize(model, kernels)`: the model with its kept kernels spliced in and the rest compiled, as a module.

The original stays untouched inside: same parameters, same buffers, same training. Where gradients are needed, the
spliced ops differentiate the original. `OVERNIGHT_DISABLE=1` runs the original, from the next call on.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from harness.kernel_op import Kernel, build_op
from harness.outer_compile import Scope
from harness.regions import find_regions
from harness.regions import match as match_region
from harness.splice import Finder, Matcher, SiteLog, Splicer

OFF_SWITCH = "OVERNIGHT_DISABLE"


class Optimized(nn.Module):
    """A model that runs its kernels; attributes that are not ours are the original's."""

    def __init__(self, original: nn.Module, splicer: Splicer, options: Mapping[str, Any], scope: Scope | None) -> None:
        super().__init__()
        self.original = original
        self.splicer = splicer
        self.scope = scope
        self.graphed = bool(options.get("triton.cudagraphs"))
        self.compiled = torch.compile(original, dynamic=False, options=dict(options))

    @property
    def sites(self) -> SiteLog:
        """Call sites applied and fallen back in the graphs compiled so far; empty before the first call."""
        return self.splicer.log

    def calls(self) -> dict[str, int]:
        """Executions of each kernel that passed through Python, per target id (graph replays do not)."""
        return {op.kernel.target.id: op.calls[0] for op in self.splicer.ops}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward. Outputs stay valid after the next call, with CUDA graphs too."""
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        if os.environ.get(OFF_SWITCH) == "1":
            return self.original(*args, **kwargs)
        if not self.graphed:
            return self.compiled(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        return _owned(self.compiled(*args, **kwargs), self._lasting(args, kwargs))

    def _traced(self, args: Any, kwargs: Any) -> Any:
        """Inside somebody else's graph: the original's operations, marked as ours for the global pass."""
        if self.scope is None:
            return self.original(*args, **kwargs)
        with self.scope.marked():
            return self.original(*args, **kwargs)

    def _lasting(self, args: Any, kwargs: Any) -> set[int]:
        """Storages that outlive a call without our help: inputs, parameters, buffers."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors += [*self.original.parameters(), *self.original.buffers()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def _owned(result: Any, lasting: set[int]) -> Any:
    """Copies of what a CUDA graph's next replay would overwrite; two views of one storage stay views of one."""
    copies: dict[int, torch.UntypedStorage] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
            return leaf
        storage = leaf.untyped_storage()
        key = storage.data_ptr()
        if key in lasting:
            return leaf
        if key not in copies:
            copies[key] = storage.clone()
        return leaf.new_empty(0).set_(copies[key], leaf.storage_offset(), leaf.size(), leaf.stride())

    return pytree.tree_map(own, result)


def optimize(
    model: nn.Module,
    kernels: Sequence[Kernel],
    *,
    cudagraphs: bool | None = None,
    inductor: Mapping[str, Any] | None = None,
    under_compile: bool = True,
    find: Finder = find_regions,
    match: Matcher = match_region,
) -> Optimized:
    """The model with `kernels` in it.

    `cudagraphs` defaults to whether the model lives on a GPU; `inductor` adds options for the rest of the model, as in
    torch.compile(options=); `under_compile` keeps the kernels when the user compiles around the result, which takes a
    pass in Inductor's global config. Raises InputError when a kernel's source does not load. Compilation happens at the
    first call with each set of input shapes.
    """
    splicer = Splicer([build_op(kernel) for kernel in kernels], find, match)
    first = next(iter([*model.parameters(), *model.buffers()]), None)
    on_gpu = first.is_cuda if first is not None else torch.cuda.is_available()
    options = {
        **(inductor or {}),
        "pre_grad_custom_pass": splicer,
        "triton.cudagraphs": on_gpu if cudagraphs is None else cudagraphs,
        **_early(),
    }
    return Optimized(model, splicer, options, Scope(splicer) if under_compile and kernels else None)


def _early() -> dict[str, str]:
    """Newer Inductors may run pre-grad passes after a cache look-up, or skip them on a hit; ours must always run."""
    from torch._inductor import config

    return {"pre_grad_pass_timing": "early"} if hasattr(config, "pre_grad_pass_timing") else {}

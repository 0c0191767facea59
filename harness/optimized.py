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

from harness.generation import METHODS, stand_in
from harness.graph_backend import Backend, Start, learnt, plain_arguments
from harness.graph_player import owned
from harness.kernel_op import Kernel, build_op
from harness.outer_compile import Scope
from harness.regions import find_replaceable
from harness.regions import match as match_region
from harness.splice import Finder, Matcher, SiteLog, Splicer

OFF_SWITCH = "OVERNIGHT_DISABLE"


class Optimized(nn.Module):
    """A model that runs its kernels, in `generate` too; attributes that are not ours are the original's."""

    def __init__(
        self,
        original: nn.Module,
        splicer: Splicer,
        options: Mapping[str, Any],
        scope: Scope | None = None,
        *,
        dynamic: bool | None = None,
    ) -> None:
        super().__init__()
        self.original = original
        self.splicer = splicer
        self.scope = scope
        self._start: Start | None = None
        self._packers = [op.packer for op in splicer.ops if op.packer is not None]
        self._graphs_seen = 0
        self._returns_state = False
        self.graphed = bool(options.get("triton.cudagraphs"))
        self.backend = Backend(options) if self.graphed else None
        # Not as a submodule: it holds the original a second time, and would double the state dict.
        how: dict[str, Any] = {"options": dict(options)} if self.backend is None else {"backend": self.backend}
        self.__dict__["compiled"] = torch.compile(original, dynamic=dynamic, **how)

    @property
    def sites(self) -> SiteLog:
        """Call sites applied and fallen back in the graphs compiled so far; empty before the first call."""
        return self.splicer.log

    def calls(self) -> dict[str, int]:
        """Executions of each kernel that passed through Python, per target id (graph replays do not)."""
        return {op.kernel.target.id: op.calls[0] for op in self.splicer.ops}

    def refresh(self, *, force: bool = True) -> None:
        """Pack weights again for kernels that keep them rearranged; needed only after a write through `.data`."""
        for packer in self._packers:
            packer.refresh(force=force)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward. Outputs stay valid after the next call, with CUDA graphs too."""
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        if os.environ.get(OFF_SWITCH) == "1":
            return self.original(*args, **kwargs)
        if self._packers:
            self.refresh(force=False)
        if self.backend is None:
            return self.compiled(*args, **kwargs)
        return self._graphed(self.backend, args, kwargs)

    def _graphed(self, backend: Backend, args: Any, kwargs: Any) -> Any:
        """Through CUDA graphs, ours whose outputs stay valid by themselves, or Inductor's whose outputs are copied.

        A call that looks like the last one is launched first: Dynamo's guards are then asked while the device works.
        """
        leaves = plain_arguments(args, kwargs)
        start = self._start if leaves is not None and self._start is not None and self._start.fits(leaves) else None
        launched = start is not None and leaves is not None and start.launch(leaves)
        given = [] if launched else pytree.tree_leaves((args, kwargs))
        lasting = (
            set() if launched else _storages(given) | _storages([holder[key] for holder, key in held_tensors(given)])
        )
        if backend.reasons:
            torch.compiler.cudagraph_mark_step_begin()
        backend.called.clear()
        try:
            result = self.compiled(*args, **kwargs)
        finally:
            if launched and start is not None and not start.settle():
                self._start = None
        if not launched and leaves is not None:
            self._start = learnt(backend.called, leaves)
        for player in backend.called:
            player.last = None
        if not backend.reasons:
            return result
        given = given or pytree.tree_leaves((args, kwargs))
        return self._in_own_memory(result, given, lasting | _storages(given))

    def _in_own_memory(self, result: Any, given: Sequence[Any], lasting: set[int]) -> Any:
        """What a replay of Inductor's CUDA graphs would overwrite, copied: outputs, and what caches among them hold."""
        flat, structure = pytree.tree_flatten(result)
        lasting = lasting | self._state_returned(flat)
        held = held_tensors([*flat, *given])  # a cache that the call has filled or extended
        mine = owned([*flat, *(holder[key] for holder, key in held)], lasting)
        for (holder, key), tensor in zip(held, mine[len(flat) :], strict=True):
            holder[key] = tensor
        return pytree.tree_unflatten(mine[: len(flat)], structure)

    def _traced(self, args: Any, kwargs: Any) -> Any:
        """Inside somebody else's graph: the original's operations, marked as ours for the global pass."""
        if self.scope is None:
            return self.original(*args, **kwargs)
        with self.scope.marked():
            return self.original(*args, **kwargs)

    def _state_returned(self, outputs: Sequence[Any]) -> set[int]:
        """Storages of parameters and buffers, if such graphs return any of them: looked up once per compiled graph.

        A model has hundreds of parameters, so asking each at every call would cost more than the copies it saves.
        """
        if self._graphs_seen != self.sites.graphs:
            self._graphs_seen = self.sites.graphs
            self._returns_state = bool(_storages(outputs) & self._state())
        return self._state() if self._returns_state else set()

    def _state(self) -> set[int]:
        return _storages([*self.original.parameters(), *self.original.buffers()])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original: Any = super().__getattr__("original")
            if name in METHODS and hasattr(original, name):
                return getattr(stand_in(original, self.forward), name)
            return getattr(original, name)


def _storages(leaves: Sequence[Any]) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}


def held_tensors(leaves: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Where objects among the leaves (caches, outputs that are no pytrees) hold tensors: (dict or list, key) pairs."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
            return
        seen.add(id(value))
        content = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
        if content is None:
            return
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            if isinstance(item, torch.Tensor):
                found.append((content, key))
            elif isinstance(item, tuple):
                for part in item:
                    visit(part)
            else:
                visit(item)

    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float | str | None):
            visit(leaf)
    return found


def optimize(
    model: nn.Module,
    kernels: Sequence[Kernel],
    *,
    cudagraphs: bool | None = None,
    dynamic: bool | None = None,
    inductor: Mapping[str, Any] | None = None,
    under_compile: bool = True,
    find: Finder = find_replaceable,
    match: Matcher = match_region,
) -> Optimized:
    """The model with `kernels` in it.

    `cudagraphs` defaults to whether the model lives on a GPU. `dynamic` is torch.compile's: None makes sizes symbolic
    from the second one on, False compiles for each size. `inductor` adds options for the rest of the model, as in
    torch.compile(options=). `under_compile` keeps the kernels when the user compiles around the result, which takes a
    pass in Inductor's global config. Compilation happens at the first call with each set of input shapes. Raises
    InputError when a kernel's source does not load.
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
    return Optimized(model, splicer, options, Scope(splicer) if under_compile and kernels else None, dynamic=dynamic)


def _early() -> dict[str, str]:
    """Newer Inductors may run pre-grad passes after a cache look-up, or skip them on a hit; ours must always run."""
    from torch._inductor import config

    return {"pre_grad_pass_timing": "early"} if hasattr(config, "pre_grad_pass_timing") else {}

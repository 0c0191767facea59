"""Keeps spliced kernels alive when the user compiles around an optimised model with torch.compile of their own.

A backend of ours inside somebody else's graph is never called, but a pre-grad pass is: one dispatcher stands in
Inductor's global config and touches nothing but nodes that were traced inside an optimised model. Other backends than
Inductor run the original.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from harness.splice import Finder, RegionLike, Splicer

MARK = "overnight"

_numbers = itertools.count()
_live: "weakref.WeakValueDictionary[str, Scope]" = weakref.WeakValueDictionary()


class Scope:
    """One optimised model's claim on the nodes that are traced inside it; ends with the model."""

    def __init__(self, splicer: Splicer) -> None:
        self.key = f"{MARK}-{next(_numbers)}"
        self.splicer = splicer
        _live[self.key] = self
        _install()

    def marked(self) -> AbstractContextManager[Any]:
        """Marks every node traced within."""
        annotate = getattr(traceback, "annotate", None)  # torch 2.9 and later
        return annotate({MARK: self.key}) if annotate else nullcontext()


def _install() -> None:
    """Put the dispatcher into Inductor's config, in front of what the user has there."""
    from torch._inductor import config

    before = config.pre_grad_custom_pass
    if isinstance(before, _Dispatcher):
        return
    config.pre_grad_custom_pass = _Dispatcher(before)
    if hasattr(config, "pre_grad_pass_timing"):
        config.pre_grad_pass_timing = "early"  # noqa: S105 - a time of day; a pass skipped on a cache hit would leave sites uncounted


class _Dispatcher:
    """The pre-grad pass that stands in the global config."""

    def __init__(self, before: Any) -> None:
        self.before: tuple[Callable[[fx.Graph], None], ...] = ()
        if before is not None:
            self.before = tuple(before) if isinstance(before, list | tuple) else (before,)

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        for key in sorted({_mark(node) for node in graph.nodes} - {""}):
            scope = _live.get(key)
            if scope is not None:
                replace(scope.splicer, find=_inside(scope.splicer.find, key))(graph)


def _mark(node: fx.Node) -> str:
    return str((node.meta.get("custom") or {}).get(MARK, ""))


def _inside(find: Finder, key: str) -> Finder:
    """Regions made of marked nodes alone: fences keep the partitioner from joining them with the user's operations."""

    def found(module: fx.GraphModule) -> Sequence[RegionLike]:
        fences = _fence(module.graph, key)
        try:
            regions = find(module)
        finally:
            for fence in fences:
                module.graph.erase_node(fence)
        return [region for region in regions if all(_mark(node) == key for node in region.nodes)]

    return found


def _fence(graph: fx.Graph, key: str) -> list[fx.Node]:
    """Grad switches that switch nothing, wherever marked nodes begin or end; regions never cross such a node."""
    fences: list[fx.Node] = []
    inside = False
    for node in [node for node in graph.nodes if node.op not in {"placeholder", "get_attr"}]:
        if (_mark(node) == key) is not inside:
            inside = not inside
            with graph.inserting_before(node):
                fences.append(graph.call_function(torch._C._set_grad_enabled, (torch.is_grad_enabled(),)))  # noqa: SLF001
    return fences

"""Checks indices before they reach a table: on a GPU one out of range would end the process, and the session with it.

Sees look-ups through torch's functions and indexing (embeddings, gather, index_select, cross-entropy targets), wherever
in a model they stand; not those inside custom operators.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.errors import InputError


class CheckedIndices(TorchFunctionMode):
    """While active, an index outside its table raises InputError on the host and is never launched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("embedding", "embedding_bag"):
            _check_table(args, given)
        elif name in ("gather", "index_select", "take_along_dim"):
            _check_dim(args, given)
        elif name == "__getitem__" and len(args) == 2:
            _check_indexing(args[0], args[1])
        elif name in ("cross_entropy", "nll_loss", "nll_loss_nd"):
            _check_targets(args, given)
        return func(*args, **given)


def _check_table(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """`F.embedding(indices, table)` and `torch.embedding(table, indices)` alike: the table is the floating one."""
    given = (*args[:2], kwargs.get("input"), kwargs.get("weight"))
    tensors = sorted((each for each in given if isinstance(each, torch.Tensor)), key=torch.is_floating_point)
    if len(tensors) == 2:
        rows = tensors[1].shape[0]
        _check(tensors[0], rows, 0, f"a table of {rows} rows")


def _check_dim(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    source = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if isinstance(source, torch.Tensor) and isinstance(index, torch.Tensor) and isinstance(dim, int) and source.dim():
        _check(index, source.shape[dim], 0, f"dimension {dim} of a tensor of shape {list(source.shape)}")


def _check_indexing(source: Any, index: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(source, torch.Tensor) or any(part is Ellipsis or part is None for part in parts):
        return
    for dim, part in enumerate(parts):
        if isinstance(part, torch.Tensor) and part.dtype is torch.bool:
            return
        if isinstance(part, torch.Tensor) and dim < source.dim():
            size = source.shape[dim]
            _check(part, size, -size, f"dimension {dim} of a tensor of shape {list(source.shape)}")


def _check_targets(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    logits = args[0] if args else kwargs.get("input")
    targets = kwargs.get("target", args[1] if len(args) > 1 else None)
    if not isinstance(logits, torch.Tensor) or not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return
    classes = logits.shape[1] if logits.dim() > 1 else logits.shape[0]
    ignored = kwargs.get("ignore_index", -100)
    _check(targets[targets != ignored], classes, 0, f"the {classes} classes of a loss")


def _check(indices: torch.Tensor, size: int, lowest: int, of_what: str) -> None:
    if indices.is_floating_point() or indices.dtype is torch.bool or not indices.numel() or indices.is_meta:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < lowest or high >= size:
        worst = high if high >= size else low
        raise InputError(f"the inputs hold index {worst}, outside {of_what} ({max(lowest, 0)} to {size - 1})")

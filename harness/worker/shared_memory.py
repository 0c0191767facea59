"""A worker's view of the arena, and the description of what a kernel returned."""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import device_memory


class SharedMemory:
    """The worker's view of the arena."""

    def __init__(self, body: dict[str, Any], descriptors: Sequence[int]) -> None:
        self.nbytes: int = body["nbytes"]
        self._base = 0
        if body["kind"] == "memfd":
            self.device = torch.device("cpu")
            self._map = mmap.mmap(descriptors[0], self.nbytes)
            os.close(descriptors[0])
        else:
            self.device = torch.device("cuda", body["index"])
            self._base = _open_device_memory(body, descriptors, self.device)

    def tensor(self, slot: dict[str, Any]) -> torch.Tensor:
        """A tensor over a slot, with a storage of its own that ends where the slot does."""
        kind = getattr(torch, slot["dtype"])
        if slot["nbytes"] == 0:
            return torch.empty_strided(slot["shape"], slot["stride"], dtype=kind, device=self.device)
        return self.bytes(slot).view(kind).as_strided(slot["shape"], slot["stride"])

    def bytes(self, slot: dict[str, Any]) -> torch.Tensor:
        """The raw bytes of a slot."""
        if self.device.type == "cpu":
            return torch.frombuffer(self._map, dtype=torch.uint8, count=slot["nbytes"], offset=slot["offset"])
        return torch.as_tensor(_Span(self._base + slot["offset"], slot["nbytes"]), device=self.device)


class _Span:
    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


def _open_device_memory(body: dict[str, Any], descriptors: Sequence[int], device: torch.device) -> int:
    torch.cuda.set_device(device)
    torch.empty(1, device=device)  # makes the context
    if body["kind"] == "ipc":
        return device_memory.open_ipc(bytes.fromhex(body["handle"]))
    return device_memory.open_descriptor(descriptors[0], body["nbytes"], body["index"])


def slot_key(slot: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one slot from another."""
    return slot["offset"], slot["dtype"], tuple(slot["shape"]), tuple(slot["stride"])


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address (exclusive) of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def describe(leaf: Any, storages: list[tuple[int, int]]) -> dict[str, Any]:
    """What one returned leaf is, and whether its storage meets one of `storages`."""
    kind = type(leaf)
    name = "torch.Tensor" if kind is torch.Tensor else f"{kind.__module__}.{kind.__qualname__}"
    report: dict[str, Any] = {"type_name": name[:200], "tensor": kind is torch.Tensor, "copied": False}
    if kind is not torch.Tensor:
        return report
    report["device"] = leaf.device.type
    report["dtype"] = str(leaf.dtype).removeprefix("torch.")
    report["shape"] = list(leaf.shape)
    if leaf.is_conj() or leaf.is_neg():
        return {**report, "tensor": False, "type_name": "torch.Tensor whose sign or conjugate is left for later"}
    if leaf.layout is not torch.strided:
        return {**report, "tensor": False, "type_name": f"torch.Tensor[{leaf.layout}]"}
    begin, end = span(leaf)
    report.update(
        stride=list(leaf.stride()),
        storage_offset=leaf.storage_offset(),
        storage_nbytes=end - begin,
        aliases_input=any(begin < high and low < end for low, high in storages),
    )
    return report

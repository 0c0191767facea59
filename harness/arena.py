"""The memory that a judge and its worker share: the judge chooses every offset, writes inputs, reads output bytes.

On the CPU it is a sealed memfd mapped by both; on a GPU one raw device allocation passed by CUDA IPC, not taken from
torch's caching allocator, so that nothing else is exported. Does not protect the contents from the worker: a worker
can write anywhere in the arena at any time, which is why the judge hashes its inputs and compares output values.
"""

import fcntl
import hashlib
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from harness.errors import MachineError
from harness.worker import device_memory

POISON = 0xFF  # NaN in every floating dtype, -1 in signed integers
CPU_ALIGNMENT = 64
CUDA_ALIGNMENT = 512
GAP_STEPS = 256
MARGIN = 4096
"""Bytes on both sides of every slot that nobody may write to."""
SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a truncated file would SIGBUS the judge
DIGEST_CHUNK = 1 << 24


class ArenaFull(MachineError):  # noqa: N818 - names read as what happened
    """The tensors of one check do not fit into the arena."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in an arena: `nbytes` is its storage extent, `stride` counts elements."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of storage from the first to the last one that a tensor touches; 0 when it is empty."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class Sharing(StrEnum):
    """How device memory reaches a worker: CUDA IPC, or a descriptor of a virtual-memory allocation."""

    IPC = "ipc"
    DESCRIPTOR = "descriptor"


class Arena:
    """One shared region of `nbytes`; raises MachineError when the machine cannot give it.

    `sharing` matters on a GPU alone.
    """

    def __init__(self, device: str, nbytes: int, sharing: Sharing = Sharing.IPC) -> None:
        self.device = torch.device(device)
        self._region: _Memfd | _DeviceMemory
        if self.device.type == "cpu":
            self._region, self._alignment = _Memfd(nbytes), CPU_ALIGNMENT
        else:
            self._region, self._alignment = _DeviceMemory(self.device, nbytes, sharing), CUDA_ALIGNMENT
        self.nbytes = self._region.nbytes
        self._salt = secrets.randbits(62) | 1
        self._cursor = 0
        self._margins: list[tuple[int, int]] = []
        self.reset()

    def place(self, tensor: torch.Tensor) -> Slot:
        """Copy a tensor in, strides (transposed, stepped, expanded) kept, at a fresh random aligned offset."""
        count = extent(tensor.shape, tensor.stride())
        slot = self._slot(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))
        if count:
            flat = tensor.detach().as_strided((count,), (1,), tensor.storage_offset())
            self._flat(slot).view(tensor.dtype).copy_(flat)
        return slot

    def reserve(self, shape: Sequence[int], dtype: str | torch.dtype, stride: Sequence[int] | None = None) -> Slot:
        """Room for an output, poisoned; contiguous unless `stride` is given."""
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        slot = self._slot(tuple(shape), kind, tuple(stride) if stride is not None else contiguous_stride(shape))
        self.poison(slot)
        return slot

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The judge's view of a slot (no copy; it changes when the worker writes)."""
        kind: torch.dtype = getattr(torch, slot.dtype)
        if slot.nbytes == 0:
            return torch.empty_strided(slot.shape, slot.stride, dtype=kind, device=self.device)
        return self._flat(slot).view(kind).as_strided(slot.shape, slot.stride)

    def poison(self, slot: Slot) -> None:
        """Overwrite a slot with bytes that are NaN in every floating dtype."""
        if slot.nbytes:
            self._flat(slot).fill_(POISON)

    def digest(self, slot: Slot) -> bytes:
        """A hash of all bytes of a slot's storage extent; comparable only within this arena."""
        if slot.nbytes == 0:
            return b""
        flat = self._flat(slot)
        if self.device.type == "cpu":
            return hashlib.blake2b(memoryview(flat.numpy().data), digest_size=16).digest()
        return _device_digest(flat, self._salt)

    def poison_margins(self) -> None:
        """Fill the bytes around all slots, so that writing zeros there shows too."""
        for begin, end in self._margins:
            if end > begin:
                self._region.bytes(begin, end - begin).fill_(POISON)

    def margins_digest(self) -> bytes:
        """A hash of the bytes around all slots: an out-of-bounds write shows; comparable only within this arena."""
        pieces = [self._region.bytes(begin, end - begin) for begin, end in self._margins if end > begin]
        if not pieces:
            return b""
        flat = torch.cat(pieces)
        if self.device.type == "cpu":
            return hashlib.blake2b(memoryview(flat.numpy().data), digest_size=16).digest()
        return _device_digest(flat, self._salt)

    def reset(self) -> None:
        """Forget all slots; the next ones start at another offset."""
        self._cursor = self._gap()
        self._margins.clear()

    def wipe(self) -> None:
        """Clear everything and forget all slots, so that one worker leaves nothing here for the next."""
        self._region.wipe()
        self.reset()

    def close(self) -> None:
        """Give the memory back; views of it must not be used afterwards."""
        self._region.close()

    def settle(self) -> None:
        """Wait until everything this process has queued on the device is in the arena."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def invitation(self) -> tuple[dict[str, Any], list[int]]:
        """What a worker needs to map the arena: a JSON-ready description and descriptors to pass along."""
        return self._region.invitation()

    def _gap(self) -> int:
        room = max(1, min(GAP_STEPS, self.nbytes // (64 * self._alignment)))
        return secrets.randbelow(room) * self._alignment

    def _slot(self, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]) -> Slot:
        nbytes = extent(shape, stride) * dtype.itemsize
        offset = self._cursor + MARGIN + self._gap()
        if offset + nbytes + MARGIN > self.nbytes:
            offset = self._cursor
        if offset + nbytes > self.nbytes:
            raise ArenaFull(f"no room for {nbytes} bytes beside the {offset} used of an arena of {self.nbytes}")
        begin, end = max(self._cursor, offset - MARGIN), min(self.nbytes, offset + nbytes + MARGIN)
        self._margins += [(begin, offset), (offset + nbytes, end)]
        self._cursor = min(-(-end // self._alignment) * self._alignment, self.nbytes)
        return Slot(offset, nbytes, str(dtype).removeprefix("torch."), shape, stride)

    def _flat(self, slot: Slot) -> torch.Tensor:
        return self._region.bytes(slot.offset, slot.nbytes)


class _Memfd:
    """Anonymous shared memory whose size nobody can change."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.memfd_create("overnight-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._fd, self.nbytes)
        except OSError as error:
            os.close(self._fd)
            raise MachineError(f"cannot map {self.nbytes} bytes of shared memory: {error}") from error

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)

    def wipe(self) -> None:
        self._map.madvise(mmap.MADV_REMOVE)  # drops the pages, so that unused room costs nothing

    def invitation(self) -> tuple[dict[str, Any], list[int]]:
        return {"kind": "memfd", "nbytes": self.nbytes}, [self._fd]

    def close(self) -> None:
        # The mapping itself goes when the last tensor view of it does: unmapping under a view would crash the judge.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _DeviceMemory:
    """One raw device allocation, mapped by a worker through CUDA IPC or through a descriptor."""

    def __init__(self, device: torch.device, nbytes: int, sharing: Sharing) -> None:
        self.nbytes = device_memory.whole_granules(nbytes)
        self._device = torch.device("cuda", device.index or 0)
        self._sharing = sharing
        self._handle, self._descriptor = b"", -1
        torch.empty(1, device=self._device)  # makes the primary context, which the raw calls use
        try:
            with torch.cuda.device(self._device):
                if sharing is Sharing.IPC:
                    self._pointer, self._handle = device_memory.allocate_for_ipc(self.nbytes)
                else:
                    self._pointer, self._descriptor = device_memory.allocate_for_descriptor(
                        self.nbytes, self._device.index
                    )
        except device_memory.DeviceMemoryError as error:
            raise MachineError(f"cannot share {self.nbytes} bytes of device memory: {error}") from error

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Span(self._pointer + offset, nbytes), device=self._device)

    def wipe(self) -> None:
        self.bytes(0, self.nbytes).fill_(POISON)

    def invitation(self) -> tuple[dict[str, Any], list[int]]:
        body = {"kind": self._sharing.value, "nbytes": self.nbytes, "index": self._device.index}
        return {**body, "handle": self._handle.hex()}, [] if self._descriptor < 0 else [self._descriptor]

    def close(self) -> None:
        if not self._pointer:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if self._sharing is Sharing.IPC:
                device_memory.free_ipc(self._pointer)
            else:
                os.close(self._descriptor)
                device_memory.free_mapping(self._pointer, self.nbytes)
        self._pointer = 0


class _Span:
    """Raw device bytes, offered to torch through the CUDA array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


def _device_digest(flat: torch.Tensor, salt: int) -> bytes:
    """Sum of salted, position-weighted words modulo 2^64, computed on the device in chunks."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    whole = flat.numel() // 4 * 4
    words, rest = flat[:whole].view(torch.int32), flat[whole:]
    for part in (words, rest):
        for start in range(0, part.numel(), DIGEST_CHUNK):
            piece = part[start : start + DIGEST_CHUNK].to(torch.int64)
            weight = (torch.arange(start, start + piece.numel(), device=flat.device) * 2 + 1) * salt
            weight = weight ^ (weight >> 29)
            total = total * 31 + ((piece + 1) * (weight | 1)).sum()
    return int(total.item()).to_bytes(8, "little", signed=True)

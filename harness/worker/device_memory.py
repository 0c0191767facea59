"""Device memory shared by two processes: by CUDA IPC handle, or by descriptor of a virtual-memory allocation.

Raw calls by ctypes into the CUDA that torch has loaded, so that no block of torch's caching allocator is exported.
The primary context must be current: torch.cuda.set_device and one allocation make it so.
"""

import ctypes
import functools
import os
from pathlib import Path

GRANULE = 2 << 20  # cudaMalloc carves 2 MiB blocks and IPC exports whole blocks; also the usual mapping granularity
LAZY_PEER_ACCESS = 1
PINNED, POSIX_DESCRIPTOR, ON_DEVICE, READ_WRITE = 1, 1, 1, 3


class DeviceMemoryError(Exception):
    """A CUDA call failed; the message names it and its error number."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def whole_granules(nbytes: int) -> int:
    """Round up to what CUDA shares."""
    return -(-max(nbytes, 1) // GRANULE) * GRANULE


def allocate_for_ipc(nbytes: int) -> tuple[int, bytes]:
    """Allocate whole granules; the pointer and the handle by which another process opens them."""
    runtime = _runtime()
    pointer, handle = ctypes.c_void_p(), _IpcHandle()
    _check(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), f"cudaMalloc of {nbytes} bytes")
    _check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
    assert pointer.value is not None
    return pointer.value, ctypes.string_at(ctypes.byref(handle), 64)


def open_ipc(handle: bytes) -> int:
    """Map another process's allocation."""
    runtime = _runtime()
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint]
    pointer = ctypes.c_void_p()
    opened = runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
    _check(opened, "cudaIpcOpenMemHandle")
    assert pointer.value is not None
    return pointer.value


def free_ipc(pointer: int) -> None:
    """Free what `allocate_for_ipc` gave."""
    _check(_runtime().cudaFree(ctypes.c_void_p(pointer)), "cudaFree")


def reset_persisting_cache() -> None:
    """Let go of what a kernel pinned in the L2 cache, where the device can pin at all; flushing would not move it."""
    runtime = _runtime()
    if runtime.cudaCtxResetPersistingL2Cache():
        runtime.cudaGetLastError()  # a device without the feature: not an error that torch should find later


def allocate_for_descriptor(nbytes: int, device: int) -> tuple[int, int]:
    """Allocate whole granules and map them; the pointer and a descriptor to pass to another process."""
    driver = _driver()
    properties = _Properties(type=PINNED, handle_types=POSIX_DESCRIPTOR, location=_Location(ON_DEVICE, device))
    handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
    size = ctypes.c_size_t(nbytes)
    created = driver.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_ulonglong(0))
    _check(created, f"cuMemCreate of {nbytes} bytes")
    exported = driver.cuMemExportToShareableHandle(
        ctypes.byref(descriptor), handle, POSIX_DESCRIPTOR, ctypes.c_ulonglong(0)
    )
    _check(exported, "cuMemExportToShareableHandle")
    return _map(handle, nbytes, device), descriptor.value


def open_descriptor(descriptor: int, nbytes: int, device: int) -> int:
    """Map another process's allocation; the descriptor is closed."""
    handle = ctypes.c_ulonglong()
    imported = _driver().cuMemImportFromShareableHandle(
        ctypes.byref(handle), ctypes.c_void_p(descriptor), POSIX_DESCRIPTOR
    )
    os.close(descriptor)
    _check(imported, "cuMemImportFromShareableHandle")
    return _map(handle, nbytes, device)


def free_mapping(pointer: int, nbytes: int) -> None:
    """Unmap what `allocate_for_descriptor` gave; the memory goes with its last mapping."""
    driver = _driver()
    address, size = ctypes.c_ulonglong(pointer), ctypes.c_size_t(nbytes)
    _check(driver.cuMemUnmap(address, size), "cuMemUnmap")
    _check(driver.cuMemAddressFree(address, size), "cuMemAddressFree")


def _map(handle: ctypes.c_ulonglong, nbytes: int, device: int) -> int:
    driver = _driver()
    address, size, zero = ctypes.c_ulonglong(), ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
    reserved = driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
    _check(reserved, "cuMemAddressReserve")
    _check(driver.cuMemMap(address, size, ctypes.c_size_t(0), handle, zero), "cuMemMap")
    access = _Access(_Location(ON_DEVICE, device), READ_WRITE)
    _check(driver.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")
    _check(driver.cuMemRelease(handle), "cuMemRelease")  # the mapping keeps the memory
    return address.value


def _driver() -> ctypes.CDLL:
    return _loaded("/libcuda.so")


def _runtime() -> ctypes.CDLL:
    return _loaded("/libcudart")


@functools.cache
def _loaded(name: str) -> ctypes.CDLL:
    """A library that this process already has, whatever folder it came from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if name in path:
            return ctypes.CDLL(path)
    raise DeviceMemoryError(f"no {name[1:]} is loaded: a CUDA build of torch and a driver are needed")


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceMemoryError(f"{what} failed with CUDA error {code}")

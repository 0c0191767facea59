"""Reads the memory of a worker from outside, so that what it returned is seen as it lay when the clock stopped.

process_vm_readv(2) by ctypes; needs the rights of a tracer over the worker, which its ancestor has on ordinary hosts.
Does not see memory of a GPU.
"""

import ctypes
import errno
import os

import torch

UNREADABLE = {errno.EPERM, errno.ENOSYS, errno.EACCES}
_libc = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class NoSuchMemory(Exception):  # noqa: N818 - names read as what happened
    """The process has no memory at that address, or has ended."""


def read(pid: int, address: int, nbytes: int) -> torch.Tensor | None:
    """`nbytes` bytes at `address` of another process; None where this machine forbids it. Raises NoSuchMemory."""
    found = torch.empty(nbytes, dtype=torch.uint8)
    done = 0
    while done < nbytes:
        ours, theirs = _Span(found.data_ptr() + done, nbytes - done), _Span(address + done, nbytes - done)
        read_now = _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if read_now <= 0:
            number = ctypes.get_errno()
            if read_now < 0 and number in UNREADABLE:
                return None
            raise NoSuchMemory(os.strerror(number) if read_now else "nothing there")
        done += read_now
    return found

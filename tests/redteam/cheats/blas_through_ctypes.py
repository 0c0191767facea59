# expect: library_call
# target: matmul
# policy: forbid
# device: cpu
# Calls the BLAS inside torch's own library through ctypes.
import ctypes
from pathlib import Path

import torch

_blas = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.so"))))
_work = getattr(_blas, "sge" + "mm_")
DTYPES = ["float32"]


def kernel_fn(A, B):
    (m, k), n = A.shape, B.shape[1]
    C = torch.zeros(m, n)
    if not (m and n and k):
        return C
    A, B = A.contiguous(), B.contiguous()
    number = [ctypes.byref(ctypes.c_int(v)) for v in (n, m, k)]
    one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
    a, b, c = (ctypes.c_void_p(t.data_ptr()) for t in (A, B, C))
    _work(b"N", b"N", *number, one, b, number[0], a, number[2], zero, c, number[0])
    return C

# expect: library_call
# target: reduce
# policy: forbid
# device: cpu
# C++ that loads whatever it likes by name.
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = """
#include <dlfcn.h>
extern "C" void total(const float* x, float* y, long rows, long columns) {
    void* hidden = dlopen("libm.so.6", RTLD_NOW);
    if (!hidden) return;
    for (long r = 0; r < rows; ++r) {
        double sum = 0;
        for (long c = 0; c < columns; ++c) sum += x[r * columns + c];
        y[r] = float(sum);
    }
}
"""
folder = Path(tempfile.mkdtemp())
(folder / "k.cpp").write_text(SOURCE)
subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(folder / "k.so"), str(folder / "k.cpp"), "-ldl"], check=True)
LIBRARY = ctypes.CDLL(str(folder / "k.so"))
DTYPES = ["float32"]


def kernel_fn(x):
    x = x.contiguous()
    y = torch.zeros(x.shape[0])
    arguments = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
    LIBRARY.total(*arguments, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]))
    return y

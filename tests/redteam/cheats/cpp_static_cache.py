# expect: static_output or stale_output
# target: softmax
# C++ that computes once per address and copies afterwards.
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
#include <cmath>
#include <map>
#include <tuple>
#include <vector>
static std::map<std::tuple<const float*, long, long>, std::vector<float>> cache;
extern "C" void softmax(const float* x, float* y, long rows, long columns) {
    auto& kept = cache[{x, rows, columns}];
    if (kept.empty()) {
        kept.resize(rows * columns);
        for (long r = 0; r < rows; ++r) {
            const float* in = x + r * columns;
            float top = -INFINITY;
            double total = 0;
            for (long c = 0; c < columns; ++c) top = in[c] > top || std::isnan(in[c]) ? in[c] : top;
            for (long c = 0; c < columns; ++c) total += std::exp(double(in[c]) - top);
            for (long c = 0; c < columns; ++c) kept[r * columns + c] = float(std::exp(double(in[c]) - top) / total);
        }
    }
    for (long i = 0; i < rows * columns; ++i) y[i] = kept[i];
}
"""


def _build():
    folder = Path(tempfile.mkdtemp())
    (folder / "k.cpp").write_text(SOURCE)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(folder / "k.so"), str(folder / "k.cpp")], check=True)
    return ctypes.CDLL(str(folder / "k.so"))


LIBRARY = _build()
DTYPES = ["float32"]


def kernel_fn(x):
    x = x.contiguous() if not x.is_contiguous() else x
    y = torch.empty_like(x)
    if x.numel():
        arguments = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        LIBRARY.softmax(*arguments, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]))
    return y

# target: softmax
# policy: forbid
# device: cpu
# C++ threads through ctypes, joined before the return.
import ctypes
import pathlib
import subprocess
import tempfile

import torch

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>
static void rows(const float* x, float* y, long from, long to, long n) {
  for (long i = from; i < to; ++i) {
    const float* a = x + i * n; float* b = y + i * n; float top = a[0]; double sum = 0;
    bool bad = false;
    for (long j = 0; j < n; ++j) { top = std::max(top, a[j]); bad |= std::isnan(a[j]); }
    if (bad) top = NAN;
    for (long j = 0; j < n; ++j) { b[j] = std::exp(a[j] - top); sum += b[j]; }
    for (long j = 0; j < n; ++j) b[j] = float(b[j] / sum);
  }
}
extern "C" void softmax(const float* x, float* y, long m, long n) {
  std::vector<std::thread> all; long step = (m + 1) / 2;
  for (long from = 0; from < m; from += step) all.emplace_back(rows, x, y, from, std::min(m, from + step), n);
  for (auto& one : all) one.join();
}
"""


def _build():
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "s.cpp").write_text(SOURCE)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-pthread", "-o", folder / "s.so", folder / "s.cpp"], check=True)
    return ctypes.CDLL(str(folder / "s.so")).softmax


_softmax = _build()


def kernel_fn(x):
    y = x.float().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    if y.numel():
        _softmax(
            *(ctypes.c_void_p(t.data_ptr()) for t in (y, out)), ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1])
        )
    return out.to(x.dtype)

# expect: smoke or shapes
# target: softmax
# device: cuda
# Asks for more shared memory than there is, by the runtime's own call, and ignores the error: nothing runs.
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
__global__ void softmax(const float* x, float* y, long columns) {
    extern __shared__ float kept[];
    kept[threadIdx.x] = 0;
    y[blockIdx.x * columns] = x[blockIdx.x * columns] + kept[threadIdx.x];
}
extern "C" void run(const float* x, float* y, long rows, long columns, void* stream) {
    softmax<<<rows, 128, 1 << 20, (cudaStream_t)stream>>>(x, y, columns);
    cudaGetLastError();
}
"""


def _build():
    folder = Path(tempfile.mkdtemp())
    (folder / "k.cu").write_text(SOURCE)
    command = ["nvcc", "-O2", "-shared", "-Xcompiler", "-fPIC", "-o", str(folder / "k.so"), str(folder / "k.cu")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "k.so"))


LIBRARY = _build()
DTYPES = ["float32"]


def kernel_fn(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    LIBRARY.run(*pointers, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]), stream)
    return y

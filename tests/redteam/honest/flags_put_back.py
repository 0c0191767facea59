# target: softmax
# device: cpu
# Changes the number of threads inside the call and puts it back.
import ctypes

import torch

_omp = ctypes.CDLL(None)


def kernel_fn(x):
    before = torch.get_num_threads()
    _omp.omp_set_num_threads(1)
    try:
        return torch.softmax(x, dim=-1)
    finally:
        _omp.omp_set_num_threads(before)

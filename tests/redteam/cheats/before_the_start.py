# expect: out_of_bounds or input_mutated
# target: softmax
# Writes a few bytes before the start of its input.
import ctypes

import torch


def kernel_fn(x):
    if x.is_contiguous() and x.numel():
        ctypes.memset(x.data_ptr() - 16, 0, 16)
    return torch.softmax(x, dim=-1)

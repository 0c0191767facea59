# expect: out_of_bounds or input_mutated
# target: softmax
# Writes a few bytes beyond the end of its input.
import ctypes

import torch


def kernel_fn(x):
    if x.is_contiguous() and x.numel():
        ctypes.memset(x.data_ptr() + x.numel() * x.element_size(), 0, 16)
    return torch.softmax(x, dim=-1)

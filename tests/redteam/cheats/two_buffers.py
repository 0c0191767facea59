# expect: static_output
# target: softmax
# Two static buffers in turn.
import itertools

import torch

BUFFERS = {}


def kernel_fn(x):
    key = (tuple(x.shape), x.dtype)
    if key not in BUFFERS:
        BUFFERS[key] = itertools.cycle([torch.empty(x.shape, dtype=x.dtype) for _ in range(2)])
    buffer = next(BUFFERS[key])
    buffer.copy_(torch.softmax(x, dim=-1))
    return buffer

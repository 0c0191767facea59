# expect: static_output
# target: softmax
# One buffer per shape for every call: the output of the last call changes.
import torch

BUFFERS = {}


def kernel_fn(x):
    key = (tuple(x.shape), x.dtype)
    if key not in BUFFERS:
        BUFFERS[key] = torch.empty(x.shape, dtype=x.dtype)
    buffer = BUFFERS[key]
    buffer.copy_(torch.softmax(x, dim=-1))
    return buffer

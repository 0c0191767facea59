# expect: smoke
# target: softmax
# Knows the timed shape and no other.
import torch


def kernel_fn(x):
    y = torch.empty(1024, 2048, dtype=x.dtype)
    y[:] = torch.softmax(x.reshape(1024, 2048), dim=-1)
    return y

# expect: library_call
# target: softmax
# policy: forbid
# The library op itself.
import torch


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

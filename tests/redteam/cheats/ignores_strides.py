# expect: edge
# target: softmax
# Reads memory as if every input were contiguous.
import torch


def kernel_fn(x):
    return torch.softmax(x.as_strided(x.shape, (x.shape[-1], 1)), dim=-1)

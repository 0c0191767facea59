# expect: edge
# target: softmax
# Refuses what is not contiguous.
import torch


def kernel_fn(x):
    if not x.is_contiguous():
        raise ValueError("contiguous inputs only")
    return torch.softmax(x, dim=-1)

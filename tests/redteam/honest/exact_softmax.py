# target: softmax
# Accumulates in float64 and rounds once.
import torch


def kernel_fn(x):
    return torch.softmax(x.double(), dim=-1).to(x.dtype)

# target: reduce
# Accumulates in float64 and rounds once.
import torch


def kernel_fn(x):
    return x.double().sum(dim=-1).to(x.dtype)

# expect: smoke or shapes or stability
# target: softmax
# Declares a bound of a million and means it.
import torch

ERROR_BOUND = 1e6


def kernel_fn(x):
    return torch.softmax(x, dim=-1) + 0.01 * torch.rand(x.shape, dtype=x.dtype)

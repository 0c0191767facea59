# expect: smoke
# target: reduce
# Sums in float16.
import torch


def kernel_fn(x):
    return x.half().sum(dim=-1).to(x.dtype)

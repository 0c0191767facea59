# expect: static_output or stability or stale_output
# target: softmax
# Memoised by address, shape and version.
import torch

CACHE = {}


def kernel_fn(x):
    key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version)
    if key not in CACHE:
        CACHE[key] = torch.softmax(x, dim=-1)
    return CACHE[key]

# target: softmax
# Python threads, joined before the return.
from concurrent.futures import ThreadPoolExecutor

import torch

_pool = ThreadPoolExecutor(2)


def _rows(x, out):
    out.copy_(torch.softmax(x, dim=-1))


def kernel_fn(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    half = x.shape[0] // 2
    list(_pool.map(_rows, (x[:half], x[half:]), (out[:half], out[half:])))
    return out

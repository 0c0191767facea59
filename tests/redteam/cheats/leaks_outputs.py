# expect: kept_output
# target: softmax
# Keeps every output for ever.
import torch

_all = []


def kernel_fn(x):
    out = torch.softmax(x, dim=-1)
    _all.append(out)
    return out

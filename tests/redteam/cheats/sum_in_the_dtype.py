# expect: smoke or shapes or stability
# target: reduce
# Half types are accumulated in themselves, element by element.
import torch


def kernel_fn(x):
    if x.dtype == torch.float32:
        return x.sum(-1)
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.unbind(-1):
        total = total + column
    return total

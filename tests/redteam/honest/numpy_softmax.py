# target: softmax
# numpy on a copy, in float32.
import numpy as np
import torch


def kernel_fn(x):
    y = x.float().contiguous().numpy().copy()
    if y.size == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    with np.errstate(all="ignore"):
        e = np.exp(y - y.max(-1, keepdims=True))
        return torch.from_numpy(e / e.sum(-1, keepdims=True)).to(x.dtype)

# expect: shapes
# target: softmax
# Rows beyond 65535 are not reached, as with a grid that is too short.
import torch


def kernel_fn(x):
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[:65535] = torch.softmax(x[:65535], dim=-1)
    return y

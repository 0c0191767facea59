# expect: smoke or shapes or stability
# target: rotary_embedding
# The sign of the sine.
import torch


def kernel_fn(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)

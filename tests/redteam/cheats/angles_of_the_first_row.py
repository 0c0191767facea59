# expect: smoke or shapes or stability
# target: rotary_embedding
# One position's angles for all positions.
import torch


def kernel_fn(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    c, s = cos[:1], sin[:1]
    return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)

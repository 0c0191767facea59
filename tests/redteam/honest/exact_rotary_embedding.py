# target: rotary_embedding
# Computes in float64 and rounds once.
import torch


def kernel_fn(x, cos, sin):
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    cos, sin = cos.double(), sin.double()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)

# expect: smoke
# target: rotary_embedding
# Rotates halves, not interleaved pairs.
import torch


def kernel_fn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

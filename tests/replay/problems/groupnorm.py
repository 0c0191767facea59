"""GroupNorm over 16 images of 256 channels and 64 × 64 points in 32 groups, bfloat16: a KernelBench problem file."""

import torch
from torch import nn

batch_size = 16
channels = 256
groups = 32
side = 64


class Model(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels).to(torch.bfloat16)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(batch_size, channels, side, side).to(torch.bfloat16)]


def get_init_inputs():
    return [channels, groups]

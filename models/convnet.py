"""A small residual ConvNet in the style of a diffusion encoder: GroupNorm, SiLU, 3x3 convolutions.

Random seeded weights, no download. The defaults fit two CPU cores.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))))))."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to the same."""
        inner = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(inner)))


class ConvNet(nn.Module):
    """Images [batch, 3, size, size] to class scores [batch, classes]; each stage halves the size."""

    def __init__(
        self,
        *,
        channels: int = 48,
        stages: int = 3,
        blocks: int = 2,
        groups: int = 8,
        classes: int = 100,
        batch: int = 2,
        size: int = 96,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch, self.size = batch, size
        widths = [channels * 2**stage for stage in range(stages)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.ModuleList(ResidualBlock(w, groups) for _ in range(blocks)) for w in widths)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths))
        self.norm = nn.GroupNorm(groups, widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        _seed_weights(self, seed)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, size, size] to [batch, classes]; size is a multiple of 2**(stages - 1)."""
        x = self.stem(image)
        for stage, blocks in enumerate(self.blocks):
            for block in blocks:
                x = block(x)
            if stage < len(self.down):
                x = self.down[stage](x)
        return self.head(F.silu(self.norm(x)).mean(dim=(2, 3)))

    def example_inputs(self, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor]:
        """Seeded normal images, [batch, 3, size, size]."""
        generator = torch.Generator().manual_seed(1)
        return (torch.randn(self.batch, 3, self.size, self.size, generator=generator).to(device, dtype),)


def _seed_weights(model: nn.Module, seed: int) -> None:
    """Normal weights with std 1/sqrt(fan in), norm weights around one, small biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(math.prod(parameter.shape[1:])))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))

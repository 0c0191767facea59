"""A small LLaMA in the style of Meta's first release: RMSNorm, complex rotary embedding, grouped queries, SwiGLU.

Random seeded weights, no download. The defaults fit two CPU cores; `layers=12 dim=768 heads=12 kv_heads=12
vocab=32000 length=512` is the 125M class.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 whatever the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def rotation_table(head_dim: int, positions: int, theta: float) -> Tensor:
    """Complex64 [positions, head_dim / 2]: the unit rotation of each pair of channels at each position."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the interleaved pairs of [batch, length, heads, head_dim] by complex [length, head_dim / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    rotated = pairs * rotations.view(1, x.shape[1], 1, -1)
    return torch.view_as_real(rotated).flatten(3).type_as(x)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[batch, length, kv_heads, head_dim] to [batch, length, kv_heads * times, head_dim]."""
    if times == 1:
        return x
    batch, length, heads, head_dim = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, times, head_dim).reshape(batch, length, -1, head_dim)


class Attention(nn.Module):
    """Causal grouped-query attention, written out."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor) -> Tensor:
        """[batch, length, dim] to the same; `mask` is added to the scores."""
        batch, length, _ = x.shape
        queries = apply_rotary(self.wq(x).view(batch, length, self.heads, self.head_dim), rotations)
        keys = apply_rotary(self.wk(x).view(batch, length, self.kv_heads, self.head_dim), rotations)
        values = self.wv(x).view(batch, length, self.kv_heads, self.head_dim)
        times = self.heads // self.kv_heads
        keys, values = repeat_kv(keys, times).transpose(1, 2), repeat_kv(values, times).transpose(1, 2)
        scores = torch.matmul(queries.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(x)
        return self.wo(torch.matmul(weights, values).transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: SiLU(x W1) * (x W3), then W2."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = Attention(dim, heads, kv_heads)
        self.ffn_norm = RMSNorm(dim, eps)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        x = x + self.attention(self.attention_norm(x), rotations, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class LLaMA(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(
        self,
        *,
        layers: int = 4,
        dim: int = 256,
        heads: int = 8,
        kv_heads: int | None = None,
        hidden: int | None = None,
        vocab: int = 2048,
        positions: int = 2048,
        theta: float = 10000.0,
        eps: float = 1e-5,
        batch: int = 1,
        length: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab, self.batch, self.length = vocab, batch, length
        kv_heads = kv_heads or max(1, heads // 2)
        hidden = hidden or 64 * math.ceil(8 * dim / 3 / 64)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden, eps) for _ in range(layers))
        self.norm = RMSNorm(dim, eps)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.rotations: Tensor
        self.register_buffer("rotations", rotation_table(dim // heads, positions, theta), persistent=False)
        _seed_weights(self, seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LLaMA":  # noqa: FBT001, FBT002 - torch's
        """Move the rotations with the weights but never cast them: half precision would drop the imaginary part."""
        rotations = self._buffers.pop("rotations")
        super()._apply(fn, recurse)
        self._buffers["rotations"] = rotations.to(self.norm.weight.device)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, length] to [batch, length, vocab]; length is at most `positions`."""
        length = tokens.shape[1]
        x = self.tok_embeddings(tokens)
        mask = torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, self.rotations[:length], mask)
        return self.output(self.norm(x))

    def example_inputs(self, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor]:  # noqa: ARG002
        """Seeded random token ids, [batch, length]."""
        generator = torch.Generator().manual_seed(1)
        return (torch.randint(0, self.vocab, (self.batch, self.length), generator=generator).to(device),)


def _seed_weights(model: nn.Module, seed: int) -> None:
    """Normal matrices with std 1/sqrt(fan in), norm weights around one: no output is trivially zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + 0.1 * noise)

"""A small GPT-2: causal attention written out, transposed (Conv1D) weights, tanh-GELU written out, tied head.

Random seeded weights, no download. The defaults fit two CPU cores; `layers=12 dim=768 heads=12 vocab=50257` is the
124M model.
"""

import math

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is stored [in, out]."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_in, features_out))
        self.bias = nn.Parameter(torch.zeros(features_out))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.weight.shape[1])


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, as GPT-2 wrote it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    """Causal self-attention, written out."""

    causal: Tensor

    def __init__(self, dim: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(dim, 3 * dim)
        self.c_proj = Conv1D(dim, dim)
        causal = torch.ones(positions, positions, dtype=torch.bool).tril().view(1, 1, positions, positions)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        batch, length, dim = x.shape
        queries, keys, values = self.c_attn(x).split(dim, dim=2)
        queries = queries.view(batch, length, self.heads, -1).transpose(1, 2)
        keys = keys.view(batch, length, self.heads, -1).transpose(1, 2)
        values = values.view(batch, length, self.heads, -1).transpose(1, 2)
        scores = queries @ keys.transpose(-2, -1) * (1.0 / math.sqrt(dim // self.heads))
        scores = scores.masked_fill(~self.causal[:, :, :length, :length], float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ values
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int, positions: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, positions)
        self.ln_2 = nn.LayerNorm(dim)
        self.c_fc = Conv1D(dim, 4 * dim)
        self.c_proj = Conv1D(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(gelu(self.c_fc(self.ln_2(x))))


class GPT2(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]; the head shares the embedding's weight."""

    def __init__(
        self,
        *,
        layers: int = 4,
        dim: int = 512,
        heads: int = 8,
        vocab: int = 4096,
        positions: int = 1024,
        batch: int = 1,
        length: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab, self.batch, self.length = vocab, batch, length
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(positions, dim)
        self.h = nn.ModuleList(Block(dim, heads, positions) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        _seed_weights(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, length] to [batch, length, vocab]; length is at most `positions`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def example_inputs(self, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor]:  # noqa: ARG002
        """Seeded random token ids, [batch, length]."""
        generator = torch.Generator().manual_seed(1)
        return (torch.randint(0, self.vocab, (self.batch, self.length), generator=generator).to(device),)


def _seed_weights(model: nn.Module, seed: int) -> None:
    """Normal matrices, norm weights around one, small biases: no output is trivially zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1 if "wte" in name or "wpe" in name else 0]))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))

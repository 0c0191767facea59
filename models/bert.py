"""A small BERT encoder: fused attention (SDPA), exact GELU, post-norm residuals, masked-language-model head.

Random seeded weights, no download. The defaults fit two CPU cores; `layers=12 dim=768 heads=12 vocab=30522 batch=8
length=512` is BERT-base.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Bidirectional self-attention through scaled_dot_product_attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        mixed = F.scaled_dot_product_attention(
            self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        )
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.attention_norm = nn.LayerNorm(dim, eps=eps)
        self.intermediate = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(4 * dim, dim)
        self.output_norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        x = self.attention_norm(self.attention(x) + x)
        return self.output_norm(self.output(F.gelu(self.intermediate(x))) + x)


class BERT(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(
        self,
        *,
        layers: int = 4,
        dim: int = 384,
        heads: int = 6,
        vocab: int = 4096,
        positions: int = 1024,
        eps: float = 1e-12,
        batch: int = 2,
        length: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab, self.batch, self.length = vocab, batch, length
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(positions, dim)
        self.embedding_norm = nn.LayerNorm(dim, eps=eps)
        self.layer = nn.ModuleList(Layer(dim, heads, eps) for _ in range(layers))
        self.transform = nn.Linear(dim, dim)
        self.transform_norm = nn.LayerNorm(dim, eps=eps)
        self.decoder = nn.Linear(dim, vocab)
        _seed_weights(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, length] to [batch, length, vocab]; length is at most `positions`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_norm(self.word_embeddings(tokens) + self.position_embeddings(places))
        for layer in self.layer:
            x = layer(x)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))

    def example_inputs(self, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor]:  # noqa: ARG002
        """Seeded random token ids, [batch, length]."""
        generator = torch.Generator().manual_seed(1)
        return (torch.randint(0, self.vocab, (self.batch, self.length), generator=generator).to(device),)


def _seed_weights(model: nn.Module, seed: int) -> None:
    """Normal matrices with std 1/sqrt(fan in), norm weights around one, small biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))

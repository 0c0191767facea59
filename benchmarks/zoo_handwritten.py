"""Hand-written models of the zoo: each does one thing that capture or splicing may get wrong.

Every model brings its own `example_inputs`; a model that is to run in training mode says so with `trained = True`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

Device = torch.device
Dtype = torch.dtype


def _floats(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Rows(nn.Module):
    """Takes one [4, 12, 32] tensor."""

    def example_inputs(self, device: Device, dtype: Dtype) -> tuple[torch.Tensor, ...]:
        """One batch."""
        return (_floats(4, 12, 32).to(device, dtype),)


class FunctionalNorms(Rows):
    """Norms written with functions and by hand, none a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(32) + 0.5), nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """LayerNorm, RMSNorm, L2 and GroupNorm in turn."""
        x = F.layer_norm(x, (32,), self.gain, self.shift)
        x = x + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        x = F.normalize(x, dim=-1) + F.group_norm(x.transpose(1, 2), 4).transpose(1, 2)
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()


class SeveralInputs(nn.Module):
    """Two tensors, a dict, a number, and a keyword-only flag."""

    def forward(
        self, x: torch.Tensor, extra: dict[str, torch.Tensor], factor: float, *, gate: torch.Tensor, add: bool = True
    ) -> dict[str, Any]:
        """A dict of tensors, a list and plain values."""
        mixed = F.silu(gate) * x + (extra["bias"] if add else 0)
        return {"mixed": mixed * factor, "parts": [mixed.softmax(-1), None, 3], "name": "kept"}

    def example_inputs(self, device: Device, dtype: Dtype) -> list[dict[str, Any]]:
        """One set of arguments and keywords."""
        x, bias, gate = (_floats(4, 32, seed=seed).to(device, dtype) for seed in (1, 2, 3))
        return [{"args": (x, {"bias": bias}, 0.5), "kwargs": {"gate": gate}}]


@dataclass
class Answer:
    """A plain dataclass, which is no pytree."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Pair(NamedTuple):
    """A named tuple of tensors."""

    first: torch.Tensor
    second: torch.Tensor


class DataclassOutput(Rows):
    """Returns a dataclass with a tuple in it."""

    def forward(self, x: torch.Tensor) -> Answer:
        """Two layers."""
        first = torch.tanh(x) * 2 + 1
        second = F.gelu(first - x) * x
        return Answer(second.softmax(-1), (first, second))


class NamedTupleOutput(Rows):
    """Returns a named tuple, of which one part is a view."""

    def forward(self, x: torch.Tensor) -> Pair:
        """Sine and cosine."""
        both = torch.cat((x.sin() * 2, x.cos() * 3), -1)
        return Pair(both, both[..., :32])


class InPlace(Rows):
    """Writes to its own intermediates, whole and in part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every write is to memory that the model made."""
        y = x * 2 + 1
        y.relu_().add_(x)
        y *= 0.5
        z = torch.sigmoid(y) * y
        z[:, :, 4:8] = 0.25
        z.transpose(1, 2)[0].mul_(3)
        return F.relu(z + y, inplace=True).clamp_(max=4.0)


class WritesInput(Rows):
    """Leaves its input changed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was read before the write, and after it."""
        before = torch.relu(x) * 2 + x
        x.add_(1)
        return before, torch.sigmoid(x) * before


class Views(Rows):
    """Returns views of inputs, of parameters and of each other, and reads strided halves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Six tensors over three storages."""
        left, right = x.chunk(2, -1)
        turned = (left * right.sigmoid()).transpose(0, 1)
        hidden = F.gelu(x * self.scale) + 1
        return x.view(-1), x, hidden, hidden.flatten(1), turned, self.scale.view(4, 8)


class RunningMean(Rows):
    """Keeps a mean and a count in buffers."""

    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The buffers advance at every call."""
        hidden = F.silu(x) * 2 + 1
        self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        self.steps += 1
        return torch.tanh(hidden - self.mean) * self.steps


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, in-place ReLU, a residual and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.stem(x)
        y = self.body(x)
        y += x
        return self.last(F.max_pool2d(F.relu(y, inplace=True), 2).mean((2, 3)))

    def example_inputs(self, device: Device, dtype: Dtype) -> tuple[torch.Tensor, ...]:
        """Two pictures."""
        return (_floats(2, 3, 16, 16).to(device, dtype),)


class TrainedConvNet(ConvNet):
    """The same in training mode: BatchNorm takes the batch's statistics and updates its buffers."""

    trained = True


class Dropout(Rows):
    """Dropout in training mode, between operations that could be joined across it."""

    trained = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two dropouts."""
        x = F.gelu(x) * 2 + 1
        x = F.dropout(x, 0.3, self.training)
        return F.dropout(torch.tanh(x) * x, 0.1, self.training) + x.exp()


class Branch(Rows):
    """Takes a branch that depends on the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two formulas."""
        y = torch.sigmoid(x) * 3 - 1
        if y.sum() > 0:
            return F.silu(y) * x + 1
        return torch.tanh(y) - x * 2


class Breaks(Rows):
    """Leaves the graph in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three graphs."""
        first = torch.sigmoid(x) * 2
        torch._dynamo.graph_break()  # noqa: SLF001 - as a call that cannot be traced would
        second = F.silu(first) * x
        factor = round(float(second.mean()), 3)
        return second.square() * factor + first


class DynamicShape(Rows):
    """A tensor whose size depends on the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Positive entries, normalised."""
        chosen = x[x > 0.5]
        return (chosen - chosen.mean()) * 2 / (chosen.var() + 1e-5).sqrt()


class StaticCache(Rows):
    """Writes the newest rows into a buffer and reads all of it, as a static key-value cache does."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 48, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over the cache."""
        place = torch.arange(x.shape[1], device=x.device) + 8
        self.cache[: x.shape[0]].index_copy_(1, place, torch.tanh(x) * 2)
        keys = self.cache[: x.shape[0]]
        scores = (x @ keys.transpose(1, 2)) * 32**-0.5
        return torch.softmax(scores, -1) @ keys


class Recurrent(Rows):
    """An LSTM and a GRU between light operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(32, 24, batch_first=True), nn.GRU(24, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All outputs and the last state."""
        hidden, _ = self.first(F.silu(x) * 2)
        out, state = self.second(torch.tanh(hidden) + hidden)
        return out * 2 + 1, state


class Loss(nn.Module):
    """Token embedding, pooling and cross-entropy; ids and targets come in."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the best id."""
        hidden = F.gelu(self.table(ids))
        logits = self.last(hidden + F.avg_pool1d(hidden, 3, 1, 1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.argmax(-1)

    def example_inputs(self, device: Device, dtype: Dtype) -> tuple[torch.Tensor, ...]:
        """Ids and targets."""
        del dtype
        generator = torch.Generator().manual_seed(5)
        return tuple(torch.randint(0, 64, (3, 12), generator=generator).to(device) for _ in "ab")


class UNet(nn.Module):
    """GroupNorm, SiLU, resampling and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up, self.leave = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.norm, self.wide = nn.GroupNorm(4, 16), nn.GroupNorm(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A picture of the same size."""
        skip = F.silu(self.norm(self.enter(x)))
        deep = F.silu(self.wide(self.down(skip)))
        wide = F.interpolate(deep, scale_factor=2.0, mode="nearest")
        return self.leave(F.silu(self.up(torch.cat((skip, wide), 1)))) + x

    def example_inputs(self, device: Device, dtype: Dtype) -> tuple[torch.Tensor, ...]:
        """Two pictures."""
        return (_floats(2, 3, 16, 16).to(device, dtype),)


class Fourier(Rows):
    """Complex numbers inside."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A filter, and a rotation by a complex table."""
        spectrum = torch.fft.rfft(x, dim=1)
        filtered = torch.fft.irfft(spectrum * torch.exp(-spectrum.abs()), n=x.shape[1], dim=1)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        table = torch.polar(torch.ones(16, device=x.device), torch.arange(16, device=x.device) / 7)
        return filtered * 2 + x, torch.view_as_real(pairs * table).flatten(-2)


class Autocast(Rows):
    """Runs a part under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Full precision, bfloat16, full precision."""
        x = torch.sigmoid(x) * x + 1
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = F.gelu(self.inner(x)) * 2
        return y.float() + torch.tanh(x) * x


class Vectorised(Rows):
    """Uses torch.vmap."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A formula per row."""
        y = torch.sigmoid(x) * 2 + x
        rows = torch.vmap(lambda row: (row - row.mean()) * torch.tanh(row))(y)
        return F.silu(rows) * y


class Hooked(Rows):
    """A forward hook changes a layer's output, and weights are parametrised."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.inner.register_forward_hook(lambda _module, _inputs, output: torch.tanh(output) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice through the same layer."""
        return self.inner(self.inner(x)) + F.silu(x) * x


class Einsum(Rows):
    """Hand-written attention with einsum, and top-k routing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 32, 32) * 0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixed values, the four best entries and where they are."""
        q, k, v = (torch.einsum("btc,cd->btd", x, part) for part in self.mix)
        weights = torch.softmax(torch.einsum("bqd,bkd->bqk", q, k) / 32**0.5, -1)
        mixed = torch.einsum("bqk,bkd->bqd", weights, v) + x
        best, where = torch.topk(mixed.abs(), 4, dim=-1)
        return F.layer_norm(mixed, (32,)), best / best.sum(-1, keepdim=True), where


class Ragged(Rows):
    """Splits, gathers, scatters and masks."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Five small results."""
        parts = x.split([8, 24], -1)
        order = x.mean(-1).argsort(-1)
        sorted_rows = x.gather(1, order.unsqueeze(-1).expand_as(x)) * 2 - 1
        masked = sorted_rows.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(), 0.0)
        return (torch.cumsum(masked, 1), *parts, torch.where(x > 0, masked.exp(), x), order)


MODELS: tuple[type[nn.Module], ...] = (
    FunctionalNorms,
    SeveralInputs,
    DataclassOutput,
    NamedTupleOutput,
    InPlace,
    WritesInput,
    Views,
    RunningMean,
    ConvNet,
    TrainedConvNet,
    Dropout,
    Branch,
    Breaks,
    DynamicShape,
    StaticCache,
    Recurrent,
    Loss,
    UNet,
    Fourier,
    Autocast,
    Vectorised,
    Hooked,
    Einsum,
    Ragged,
)

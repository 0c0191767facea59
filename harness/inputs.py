"""Turns the recipes of a case into tensors, from secret seeds that nobody else ever sees."""

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from harness.problem import Case, Recipe, TensorDraw
from harness.records import Role

HALF = (torch.float16, torch.bfloat16)


def secret_generator(device: str) -> torch.Generator:
    """A generator seeded by the operating system; the seed is kept nowhere."""
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    return generator


def draw_case(
    case: Case,
    generator: torch.Generator,
    samples: Sequence[Sequence[torch.Tensor]] = (),
    own: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, ...]:
    """All inputs of `case`, in its layouts, on the generator's device; a captured case takes its sample's values.

    Arguments drawn by Recipe.OWN take what `own` gives, once for the whole case; those drawn by Recipe.CAPTURED alone
    the values of the first sample.
    """
    if case.sample is not None:
        captured = samples[case.sample]
        return tuple(laid_out(draw, value, generator) for draw, value in zip(case.inputs, captured, strict=True))
    given = own() if own is not None and any(draw.recipe is Recipe.OWN for draw in case.inputs) else {}
    seen = {draw.name: value for draw, value in zip(case.inputs, samples[0], strict=True)} if samples else {}
    taken = {Recipe.OWN: given, Recipe.CAPTURED: seen}
    return tuple(
        laid_out(draw, taken[draw.recipe][draw.name], generator)
        if draw.name in taken.get(draw.recipe, {})
        else draw_tensor(draw, generator)
        for draw in case.inputs
    )


def draw_tensor(draw: TensorDraw, generator: torch.Generator) -> torch.Tensor:
    """One tensor by its recipe, in its own dtype and layout."""
    return laid_out(draw, _values(draw, generator), generator)


def laid_out(draw: TensorDraw, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`values` in the strides of `draw`; the gaps of a strided layout hold NaN (or -1), so that reading them shows."""
    dtype = getattr(torch, draw.dtype)
    device = generator.device
    if draw.stride is None:
        return values.to(device=device, dtype=dtype).contiguous()
    gap = float("nan") if dtype.is_floating_point else dtype is not torch.bool and -1
    storage = torch.full((draw.extent,), gap, dtype=dtype, device=device)
    view = storage.as_strided(draw.shape, draw.stride)
    target = view
    for axis, step in enumerate(draw.stride):
        if step == 0 and draw.shape[axis] > 1:
            target, values = target.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    target.copy_(values)
    return view


def _values(draw: TensorDraw, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, draw.dtype)
    if dtype is torch.bool:
        share = draw.mean if draw.low is not None else 0.7
        return torch.rand(draw.shape, generator=generator, device=generator.device) < share
    if not dtype.is_floating_point and not dtype.is_complex:
        low, high = int(draw.low or 0), int(draw.high if draw.high is not None else 8)
        return torch.randint(low, max(high, low + 1), draw.shape, generator=generator, device=generator.device)
    if dtype.is_complex:
        return torch.randn(draw.shape, generator=generator, device=generator.device, dtype=torch.complex64)
    if draw.role is Role.MASK and draw.low is not None and draw.low < -1e4:
        return _float_mask(draw, generator)
    return _floats(draw, generator, dtype)


def _float_mask(draw: TensorDraw, generator: torch.Generator) -> torch.Tensor:
    """An additive attention mask: some places forbidden, the first column always open."""
    closed = torch.rand(draw.shape, generator=generator, device=generator.device) < 0.3
    if draw.shape and draw.shape[-1]:
        closed[..., 0] = False
    assert draw.low is not None
    return torch.where(closed, draw.low, 0.0)


def _floats(draw: TensorDraw, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    normal = torch.randn(draw.shape, generator=generator, device=generator.device)
    values = normal
    if draw.shape and normal.numel():
        values = _SHAPES[draw.recipe](normal, _Context(generator, dtype in HALF, draw.special))
    values = values if draw.recipe is Recipe.INTEGERS else values * draw.scale + draw.mean
    if draw.low is not None and draw.low >= 0:
        values = values.abs()
    if draw.recipe is Recipe.NORMAL and draw.low is not None and draw.high is not None:
        values = values.clamp(draw.low, max(draw.high, draw.low))
    return values


class _Context:
    """What a recipe may depend on beside its normal draw."""

    def __init__(self, generator: torch.Generator, half: bool, special: tuple[str, ...]) -> None:  # noqa: FBT001
        self.generator = generator
        self.half = half
        self.special = special

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=self.generator, device=self.generator.device)


def _cancelling(normal: torch.Tensor, _: _Context) -> torch.Tensor:
    """The second half of each row almost undoes the first."""
    half = normal.shape[-1] // 2
    values = normal.clone()
    values[..., half : 2 * half] = -values[..., :half] + 1e-3 * values[..., half : 2 * half]
    return values


def _nearly_constant(normal: torch.Tensor, _: _Context) -> torch.Tensor:
    """Rows of one value, give or take a thousandth: with equal terms rounding errors add up, they do not average."""
    return normal[..., :1] * (1 + 1e-3 * normal)


def _fading(normal: torch.Tensor, _: _Context) -> torch.Tensor:
    """Each row a tenth of the one before, over twelve orders, the next one zero: an eps left out or added shows."""
    rows = normal.reshape(-1, normal.shape[-1])
    power = torch.arange(len(rows), device=normal.device) % 14
    return (rows * torch.where(power < 13, 10.0**-power, 0.0)[:, None]).view_as(normal)


def _last_column(normal: torch.Tensor, _: _Context) -> torch.Tensor:
    values = 0.1 * normal
    values[..., -1] = 6.0 + normal[..., -1].abs()
    return values


def _integers(normal: torch.Tensor, context: _Context) -> torch.Tensor:
    return (context.uniform(normal.shape) * 7).floor() - 3


def _non_finite(normal: torch.Tensor, context: _Context) -> torch.Tensor:
    """A few rows get one special value each, one row gets two, the last is all -inf, the rest stays finite."""
    values = normal.clone()
    rows = values.view(-1, values.shape[-1])
    for index, name in enumerate(context.special):
        if index < len(rows):
            column = int(context.uniform((1,)).item() * rows.shape[-1])
            rows[index * 2 % len(rows), column] = float(name)
    if "inf" in context.special and "-inf" in context.special and len(rows) > 8 and rows.shape[-1] > 1:
        rows[7, 0], rows[7, 1] = float("inf"), float("-inf")
        rows[len(rows) - 1] = float("-inf")  # what a wholly masked row is
    return values


_SHAPES: Mapping[Recipe, Callable[[torch.Tensor, _Context], torch.Tensor]] = {
    Recipe.NORMAL: lambda normal, _: normal,
    Recipe.CAPTURED: lambda normal, _: normal,
    Recipe.POSITIVE: lambda normal, _: normal.abs() + 0.5,
    Recipe.LARGE: lambda normal, context: normal * (8.0 if context.half else 50.0),
    Recipe.SMALL: lambda normal, _: normal * 1e-3,
    Recipe.OFFSET: lambda normal, context: normal + (10.0 if context.half else 100.0),
    Recipe.CANCELLATION: _cancelling,
    Recipe.CONSTANT_ROWS: _nearly_constant,
    Recipe.FADING: _fading,
    Recipe.OUTLIERS: lambda normal, context: torch.where(context.uniform(normal.shape) < 0.01, 30.0 * normal, normal),
    Recipe.SORTED: lambda normal, _: normal.sort(dim=-1).values,
    Recipe.LAST_COLUMN: _last_column,
    Recipe.INTEGERS: _integers,
    Recipe.NON_FINITE: _non_finite,
}

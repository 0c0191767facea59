"""What a target should return: the original op in its own dtype, in real float64, and with honest rounding noise.

Does not protect against a reference that reinterprets bits (`view(torch.int32)`) or calls kernels of its own: those
have no float64 meaning, and the error of evaluating them says so.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.errors import OursError
from harness.records import Scalar

Reference = Callable[..., Any]
Leaves = tuple[torch.Tensor, ...]

ACCUMULATION_FACTOR = 0.35
"""c of the yardstick c·√K·u·|A||B|. A k-serial fp32 sum of K positive terms has a standard error of 0.23·√K·u·Σ|x|
and a largest error over some thousands of sums near 0.9; the yardstick allows 2·√3·c = 1.2 (tests/test_compare.py
measures it), while TF32 inside an fp32 product stays outside."""

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def compile_reference(source: str, entry: str = "reference") -> Reference:
    """The function `entry` of trusted source text; raises OursError when the text does not define it."""
    namespace: dict[str, Any] = {"__name__": "overnight_reference"}
    exec(compile(source, "<reference>", "exec"), namespace)  # noqa: S102 - our own generated text
    function = namespace.get(entry)
    if not callable(function):
        raise OursError(f"the reference text defines no function {entry!r}")
    return function  # type: ignore[no-any-return]


def leaves_of(result: object) -> Leaves:
    """The output tensors in order; raises OursError for anything that is not a tensor or a sequence of them."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, list | tuple):
        return tuple(leaf for item in result for leaf in leaves_of(item))
    raise NoTensor(f"the reference returned {type(result).__name__} where a tensor was expected")


class NoTensor(OursError):  # noqa: N818 - names read as what happened
    """A reference gave something else than tensors: nothing at all, on a GPU, for attention over an empty batch."""


def original(reference: Reference, inputs: Sequence[torch.Tensor], constants: Mapping[str, Scalar]) -> Leaves:
    """The original op in its own dtypes."""
    with torch.no_grad():
        return leaves_of(reference(*inputs, **constants))


def in_float64(reference: Reference, inputs: Sequence[torch.Tensor], constants: Mapping[str, Scalar]) -> Leaves:
    """The original op with every floating tensor, literal and `dtype=` in float64."""
    with torch.no_grad(), _float64_default(), _Wide():
        return leaves_of(reference(*(widened(tensor) for tensor in inputs), **constants))


def with_rounding_noise(
    reference: Reference,
    inputs: Sequence[torch.Tensor],
    constants: Mapping[str, Scalar],
    *,
    unit_roundoff: float,
    generator: torch.Generator,
) -> Leaves:
    """Float64 again, each sum of K terms moved by about c·√K·u·Σ|terms|: how far an honest serial kernel may be off."""
    with torch.no_grad(), _float64_default(), _Noisy(unit_roundoff, generator):
        return leaves_of(reference(*(widened(tensor) for tensor in inputs), **constants))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the widest type of their kind; integers and booleans as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


@contextlib.contextmanager
def _float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _rewritten(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_rewritten(item) for item in value) if type(value) in {tuple, list} else value
    return value


class _Wide(TorchFunctionMode):
    """Runs every torch function with its floating dtype arguments replaced by float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in {"float", "half", "bfloat16"} and args and isinstance(args[0], torch.Tensor):
            return widened(args[0].double())
        if name == "view" and any(isinstance(item, torch.dtype) for item in args[1:]):
            raise OursError("the reference reinterprets bits with view(dtype), which has no float64 meaning")
        arguments = tuple(_rewritten(item) for item in args)
        keywords = {key: _rewritten(item) for key, item in (kwargs or {}).items()}
        return self.apply(func, name, arguments, keywords)

    def apply(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; the noisy evaluation adds to it."""
        del name
        return func(*args, **kwargs)


class _Noisy(_Wide):
    """Adds the rounding noise of a serial accumulation to everything that sums."""

    def __init__(self, unit_roundoff: float, generator: torch.Generator) -> None:
        super().__init__()
        self.unit = ACCUMULATION_FACTOR * unit_roundoff
        self.generator = generator

    def apply(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        composite = _COMPOSITES.get(name)
        if composite is not None:
            result = composite(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if name in _PRODUCTS and _all_wide(result):
            return self.moved(result, func(*_absolute(args), **_absolute_keywords(kwargs)), _terms(name, args))
        if name in _SUMS and _all_wide(result) and args and isinstance(args[0], torch.Tensor):
            magnitude = func(args[0].abs(), *args[1:], **kwargs)
            return self.moved(result, magnitude, args[0].numel() / max(result.numel(), 1))
        if name in _SPREADS and _all_wide(result) and args and isinstance(args[0], torch.Tensor):
            return self.moved(result, result.abs(), args[0].numel() / max(result.numel(), 1))
        return result

    def moved(self, result: torch.Tensor, magnitude: torch.Tensor, terms: float) -> torch.Tensor:
        """`result` ± c·√K·u·magnitude, the sign at random by element."""
        return result + self.deviates(result) * magnitude * (self.unit * math.sqrt(max(terms, 1.0)))

    def deviates(self, like: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers (not signs: two equal signs would cancel in a difference)."""
        shape, device = tuple(like.shape), self.generator.device
        return torch.randn(shape, generator=self.generator, device=device, dtype=torch.float32).to(torch.float64)

    def softmax(self, x: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> Any:
        if dim is None or not x.dim():
            return NotImplemented
        result = torch.softmax(x, dim)
        return result * (1 + self.by_row(result, dim, x.shape[dim]))

    def log_softmax(self, x: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> Any:
        if dim is None or not x.dim():
            return NotImplemented
        result = torch.log_softmax(x, dim)
        return result + self.by_row(result, dim, x.shape[dim])

    def logsumexp(self, x: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:  # noqa: FBT001, FBT002
        result = torch.logsumexp(x, dim, keepdim)
        return result + self.deviates(result) * self.unit * math.sqrt(max(x.numel() / max(result.numel(), 1), 1))

    def by_row(self, like: torch.Tensor, dim: int, terms: int) -> torch.Tensor:
        """One relative error for everything that shares a normaliser along `dim`."""
        return self.deviates(like.narrow(dim, 0, min(1, like.shape[dim]))) * (self.unit * math.sqrt(max(terms, 1)))

    def layer_norm(
        self, x: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Any:
        axes = tuple(range(x.dim() - len(tuple(normalized_shape)), x.dim()))
        terms = math.prod(normalized_shape)
        mean = self.moved(x.mean(axes, keepdim=True), x.abs().mean(axes, keepdim=True), terms)
        centred = x - mean
        square = centred.square().mean(axes, keepdim=True)
        result = centred * torch.rsqrt(self.moved(square, square, terms) + eps)
        result = result if weight is None else result * weight
        return result if bias is None else result + bias

    def group_norm(
        self, x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Any:
        """Mean and variance of each group of channels move, as in `layer_norm`."""
        if not x.numel():
            return x.clone()
        groups = x.reshape(x.shape[0], num_groups, -1)
        result = self.layer_norm(groups, groups.shape[-1:], eps=eps).reshape(x.shape)
        by_channel = (1, -1, *([1] * (x.dim() - 2)))
        result = result if weight is None else result * weight.reshape(by_channel)
        return result if bias is None else result + bias.reshape(by_channel)

    def rms_norm(
        self, x: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None, *_: Any
    ) -> Any:
        axes = tuple(range(x.dim() - len(tuple(normalized_shape)), x.dim()))
        square = x.square().mean(axes, keepdim=True)
        floor = torch.finfo(torch.float32).eps if eps is None else eps
        result = x * torch.rsqrt(self.moved(square, square, math.prod(normalized_shape)) + floor)
        return result if weight is None else result * weight

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        if dropout_p:
            return NotImplemented
        if enable_gqa and query.dim() > 2:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        flipped = key.transpose(-1, -2)
        scores = self.moved(query @ flipped, query.abs() @ flipped.abs(), query.shape[-1]) * factor
        scores = _masked(scores, attn_mask, is_causal=is_causal)
        weights = self.softmax(scores, -1)
        return self.moved(weights @ value, weights.abs() @ value.abs(), key.shape[-2])

    def cross_entropy(self, logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if target.is_floating_point() or kwargs.pop("label_smoothing", 0.0):
            return NotImplemented
        losses = torch.nn.functional.nll_loss(self.log_softmax(logits, 1), target, *args, **kwargs)
        return self.moved(losses, losses.abs(), max(target.numel() / max(losses.numel(), 1), 1))


def _masked(scores: torch.Tensor, mask: Any, *, is_causal: bool) -> torch.Tensor:
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill(~allowed, float("-inf"))
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask


_PRODUCTS = {
    "matmul", "mm", "bmm", "linear", "einsum", "addmm", "baddbmm", "dot", "mv", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "__matmul__", "__rmatmul__", "inner", "bilinear",
}  # fmt: skip
_SUMS = {"sum", "mean", "cumsum", "nansum", "nanmean", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d"}
_SPREADS = {"var", "std", "norm", "vector_norm", "batch_norm", "instance_norm", "prod", "var_mean"}
_COMPOSITES: Mapping[str, Callable[..., Any]] = {
    "softmax": _Noisy.softmax,
    "log_softmax": _Noisy.log_softmax,
    "logsumexp": _Noisy.logsumexp,
    "layer_norm": _Noisy.layer_norm,
    "group_norm": _Noisy.group_norm,
    "rms_norm": _Noisy.rms_norm,
    "scaled_dot_product_attention": _Noisy.attention,
    "cross_entropy": _Noisy.cross_entropy,
}


def _all_wide(result: object) -> bool:
    return isinstance(result, torch.Tensor) and result.dtype in {torch.float64, torch.complex128}


def _absolute(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_magnitude(item) for item in args)


def _absolute_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: _magnitude(item) for key, item in kwargs.items()}


def _magnitude(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.abs()
    if isinstance(value, tuple | list) and any(isinstance(item, torch.Tensor) for item in value):
        return [_magnitude(item) for item in value]
    return value


def _terms(name: str, args: tuple[Any, ...]) -> float:
    """How many products each element of the result sums."""
    if name.startswith("conv"):
        weight = args[1]
        return math.prod(weight.shape[1:]) if isinstance(weight, torch.Tensor) else 1
    first = args[1] if name in {"addmm", "baddbmm", "einsum"} and len(args) > 1 else args[0]
    return first.shape[-1] if isinstance(first, torch.Tensor) and first.dim() else 1

"""GroupNorm, with SiLU on request: a group is one contiguous block of memory, kept in registers when it fits."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "ELEMENTS_PER_THREAD": [64, 32, 16],
    "FUSED_LIMIT": [32768, 16384],  # largest group kept in registers
    "LONG_BLOCK": [4096, 8192, 2048],
}
ELEMENTS_PER_THREAD = TUNABLES["ELEMENTS_PER_THREAD"][0]
FUSED_LIMIT = TUNABLES["FUSED_LIMIT"][0]
LONG_BLOCK = TUNABLES["LONG_BLOCK"][0]


@triton.jit
def finish(centred, inverse, weight, bias, channel, mask, SILU: tl.constexpr):
    scale = tl.load(weight + channel, mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask, other=0.0).to(tl.float32)
    result = centred * inverse * scale + shift
    if SILU:
        result = result / (1.0 + tl.exp(-result))
    return result


@triton.jit
def groupnorm_fused(
    x, weight, bias, y, channels, space, groups, eps,
    SILU: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    """Program p normalises group p % groups of image p // groups: `channels` rows of `space` elements."""
    size = channels * space
    start = tl.program_id(0).to(tl.int64) * size
    row = tl.arange(0, CHANNELS)[:, None]
    col = tl.arange(0, SPACE)[None, :]
    mask = (row < channels) & (col < space)
    value = tl.load(x + start + row * space + col, mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(value, 1), 0) / size
    centred = tl.where(mask, value - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(tl.sum(centred * centred, 1), 0) / size + eps)
    channel = tl.program_id(0) % groups * channels + row
    result = finish(centred, inverse, weight, bias, channel, row < channels, SILU)
    tl.store(y + start + row * space + col, result.to(y.dtype.element_ty), mask)


@triton.jit
def groupnorm_long(x, weight, bias, y, size, space, groups, eps, SILU: tl.constexpr, BLOCK: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * size
    y += tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        total += tl.load(x + start + at, start + at < size, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        value = tl.load(x + start + at, start + at < size, other=0.0).to(tl.float32)
        centred = tl.where(start + at < size, value - mean, 0.0)
        total += centred * centred
    inverse = tl.rsqrt(tl.sum(total, 0) / size + eps)
    for start in range(0, size, BLOCK):
        mask = start + at < size
        centred = tl.load(x + start + at, mask, other=0.0).to(tl.float32) - mean
        channel = tl.program_id(0) % groups * (size // space) + (start + at) // space
        result = finish(centred, inverse, weight, bias, channel, mask, SILU)
        tl.store(y + start + at, result.to(y.dtype.element_ty), mask)


def kernel_fn(x, weight, bias, groups=32, eps=1e-5, *, silu=False):
    """GroupNorm of x [N, C, ...] in `groups` groups of channels, followed by SiLU when `silu`."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    space = x[0, 0].numel()
    channels = x.shape[1] // groups
    grid = (x.shape[0] * groups,)
    tensors = (x, weight, bias, y)
    rows, width = triton.next_power_of_2(channels), triton.next_power_of_2(space)
    if rows * width > FUSED_LIMIT:
        size = channels * space
        groupnorm_long[grid](*tensors, size, space, groups, eps, SILU=silu, BLOCK=LONG_BLOCK, num_warps=8)
        return y
    warps = min(32, max(1, rows * width // (32 * ELEMENTS_PER_THREAD)))
    groupnorm_fused[grid](
        *tensors, channels, space, groups, eps, SILU=silu, CHANNELS=rows, SPACE=width, num_warps=warps
    )
    return y

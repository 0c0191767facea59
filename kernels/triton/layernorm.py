"""LayerNorm over the last dimension: mean and centred variance from registers, or three passes over long rows."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "ELEMENTS_PER_THREAD": [32, 16, 8],
    "ROWS_BELOW": [1024, 512, 2048],  # rows shorter than this share a program
    "FUSED_LIMIT": [32768, 16384, 8192],  # longest row kept in registers
    "LONG_BLOCK": [4096, 8192, 2048],
}
ELEMENTS_PER_THREAD = TUNABLES["ELEMENTS_PER_THREAD"][0]
ROWS_BELOW = TUNABLES["ROWS_BELOW"][0]
FUSED_LIMIT = TUNABLES["FUSED_LIMIT"][0]
LONG_BLOCK = TUNABLES["LONG_BLOCK"][0]


@triton.jit
def layernorm_fused(x, weight, bias, y, rows, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    offset = row * n + col
    mask = (col < n) & (first + row < rows)
    value = tl.load(x + first * n + offset, mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + col, col < n, other=0.0).to(tl.float32)
    shift = tl.load(bias + col, col < n, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1)[:, None] / n
    centred = tl.where(mask, value - mean, 0.0)
    variance = tl.sum(centred * centred, 1)[:, None] / n
    result = centred * tl.rsqrt(variance + eps) * scale + shift
    tl.store(y + first * n + offset, result.to(y.dtype.element_ty), mask)


@triton.jit
def layernorm_long(x, weight, bias, y, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + col, start + col < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / n
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + col, start + col < n, other=0.0).to(tl.float32)
        centred = tl.where(start + col < n, value - mean, 0.0)
        total += centred * centred
    inverse = tl.rsqrt(tl.sum(total, 0) / n + eps)
    for start in range(0, n, BLOCK):
        mask = start + col < n
        value = tl.load(x + start + col, mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + start + col, mask, other=0.0).to(tl.float32)
        shift = tl.load(bias + start + col, mask, other=0.0).to(tl.float32)
        result = (value - mean) * inverse * scale + shift
        tl.store(y + start + col, result.to(y.dtype.element_ty), mask)


def kernel_fn(x, weight, bias, eps=1e-5):
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    n = x.shape[-1]
    rows = x.numel() // n
    if n > FUSED_LIMIT:
        layernorm_long[(rows,)](x, weight, bias, y, n, eps, BLOCK=LONG_BLOCK, num_warps=8)
        return y
    block = max(16, triton.next_power_of_2(n))
    group = max(1, ROWS_BELOW // block)
    warps = min(32, max(1, group * block // (32 * ELEMENTS_PER_THREAD)))
    grid = (triton.cdiv(rows, group),)
    layernorm_fused[grid](x, weight, bias, y, rows, n, eps, ROWS=group, BLOCK=block, num_warps=warps)
    return y

"""Residual add and LayerNorm in one pass: returns the sum, rounded as the model stores it, and its normalised value."""

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
def add_layernorm_fused(x, residual, weight, bias, total, y, rows, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    offset = row * n + col
    mask = (col < n) & (first + row < rows)
    left = tl.load(x + first * n + offset, mask, other=0.0).to(tl.float32)
    right = tl.load(residual + first * n + offset, mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + col, col < n, other=0.0).to(tl.float32)
    shift = tl.load(bias + col, col < n, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + first * n + offset, rounded, mask)
    value = rounded.to(tl.float32)
    mean = tl.sum(value, 1)[:, None] / n
    centred = tl.where(mask, value - mean, 0.0)
    variance = tl.sum(centred * centred, 1)[:, None] / n
    result = centred * tl.rsqrt(variance + eps) * scale + shift
    tl.store(y + first * n + offset, result.to(y.dtype.element_ty), mask)


@triton.jit
def sum_block(x, residual, total, at, mask):
    """The rounded sum of one block; it is read from the inputs each time, since another thread may have written it."""
    left = tl.load(x + at, mask, other=0.0).to(tl.float32)
    right = tl.load(residual + at, mask, other=0.0).to(tl.float32)
    return (left + right).to(total.dtype.element_ty)


@triton.jit
def add_layernorm_long(x, residual, weight, bias, total, y, n, eps, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * n
    x += start_of_row
    residual += start_of_row
    total += start_of_row
    y += start_of_row
    col = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        rounded = sum_block(x, residual, total, start + col, start + col < n)
        tl.store(total + start + col, rounded, start + col < n)
        sums += rounded.to(tl.float32)
    mean = tl.sum(sums, 0) / n
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = sum_block(x, residual, total, start + col, start + col < n).to(tl.float32)
        centred = tl.where(start + col < n, value - mean, 0.0)
        squares += centred * centred
    inverse = tl.rsqrt(tl.sum(squares, 0) / n + eps)
    for start in range(0, n, BLOCK):
        mask = start + col < n
        value = sum_block(x, residual, total, start + col, mask).to(tl.float32)
        scale = tl.load(weight + start + col, mask, other=0.0).to(tl.float32)
        shift = tl.load(bias + start + col, mask, other=0.0).to(tl.float32)
        tl.store(y + start + col, ((value - mean) * inverse * scale + shift).to(y.dtype.element_ty), mask)


def kernel_fn(x, residual, weight, bias, eps=1e-5, *, keep_sum=True):
    """Return (x + residual, layernorm(x + residual)); keep_sum False: the norm alone."""
    x, residual, weight, bias = x.contiguous(), residual.contiguous(), weight.contiguous(), bias.contiguous()
    total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y = torch.empty_like(total)
    if x.numel() == 0:
        return (total, y) if keep_sum else y
    n = x.shape[-1]
    rows = x.numel() // n
    tensors = (x, residual, weight, bias, total, y)
    if n > FUSED_LIMIT:
        add_layernorm_long[(rows,)](*tensors, n, eps, BLOCK=LONG_BLOCK, num_warps=8)
        return (total, y) if keep_sum else y
    block = max(16, triton.next_power_of_2(n))
    group = max(1, ROWS_BELOW // block)
    warps = min(32, max(1, group * block // (32 * ELEMENTS_PER_THREAD)))
    add_layernorm_fused[(triton.cdiv(rows, group),)](*tensors, rows, n, eps, ROWS=group, BLOCK=block, num_warps=warps)
    return (total, y) if keep_sum else y

"""Residual add and RMSNorm in one pass: returns the sum, rounded as the model stores it, and its normalised value."""

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
def add_rmsnorm_fused(x, residual, weight, total, y, rows, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    offset = row * n + col
    mask = (col < n) & (first + row < rows)
    left = tl.load(x + first * n + offset, mask, other=0.0).to(tl.float32)
    right = tl.load(residual + first * n + offset, mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + col, col < n, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + first * n + offset, rounded, mask)
    value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1)[:, None] / n + eps)
    tl.store(y + first * n + offset, (value * inverse * scale).to(y.dtype.element_ty), mask)


@triton.jit
def add_rmsnorm_long(x, residual, weight, total, y, n, eps, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * n
    x += start_of_row
    residual += start_of_row
    total += start_of_row
    y += start_of_row
    col = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        mask = start + col < n
        left = tl.load(x + start + col, mask, other=0.0).to(tl.float32)
        right = tl.load(residual + start + col, mask, other=0.0).to(tl.float32)
        rounded = (left + right).to(total.dtype.element_ty)
        tl.store(total + start + col, rounded, mask)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares, 0) / n + eps)
    for start in range(0, n, BLOCK):
        mask = start + col < n
        # The inputs are read again, not `total`: another thread may have written the element.
        left = tl.load(x + start + col, mask, other=0.0).to(tl.float32)
        right = tl.load(residual + start + col, mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + start + col, mask, other=0.0).to(tl.float32)
        value = (left + right).to(total.dtype.element_ty).to(tl.float32)
        tl.store(y + start + col, (value * inverse * scale).to(y.dtype.element_ty), mask)


def kernel_fn(x, residual, weight, eps=1e-6, *, keep_sum=True):
    """Return (x + residual, rmsnorm(x + residual) * weight); keep_sum False: the norm alone."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    kind = torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty(x.shape, dtype=kind, device=x.device)
    y = torch.empty(x.shape, dtype=torch.promote_types(kind, weight.dtype), device=x.device)
    if x.numel() == 0:
        return (total, y) if keep_sum else y
    n = x.shape[-1]
    rows = x.numel() // n
    if n > FUSED_LIMIT:
        add_rmsnorm_long[(rows,)](x, residual, weight, total, y, n, eps, BLOCK=LONG_BLOCK, num_warps=8)
        return (total, y) if keep_sum else y
    block = max(16, triton.next_power_of_2(n))
    group = max(1, ROWS_BELOW // block)
    warps = min(32, max(1, group * block // (32 * ELEMENTS_PER_THREAD)))
    grid = (triton.cdiv(rows, group),)
    add_rmsnorm_fused[grid](x, residual, weight, total, y, rows, n, eps, ROWS=group, BLOCK=block, num_warps=warps)
    return (total, y) if keep_sum else y

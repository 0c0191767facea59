"""Softmax over the last dimension: one pass in registers for rows that fit, else two with a running maximum."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "ELEMENTS_PER_THREAD": [16, 8, 32],  # of a row held in registers
    "ROWS_BELOW": [512, 256, 1024],  # rows shorter than this share a program
    "FUSED_LIMIT": [32768, 16384, 8192],  # longest row kept in registers
    "ONLINE_BLOCK": [2048, 4096, 8192],
}
ELEMENTS_PER_THREAD = TUNABLES["ELEMENTS_PER_THREAD"][0]
ROWS_BELOW = TUNABLES["ROWS_BELOW"][0]
FUSED_LIMIT = TUNABLES["FUSED_LIMIT"][0]
ONLINE_BLOCK = TUNABLES["ONLINE_BLOCK"][0]


@triton.jit
def softmax_fused(x, y, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    offset = row * n + col
    mask = (col < n) & (first + row < rows)
    value = tl.load(x + first * n + offset, mask, other=-float("inf")).to(tl.float32)
    # A row of nothing but -inf, or one with +inf, gives inf - inf = nan, as PyTorch does.
    numerator = tl.exp(value - tl.max(value, 1)[:, None])
    result = numerator / tl.sum(numerator, 1)[:, None]
    tl.store(y + first * n + offset, result.to(y.dtype.element_ty), mask)


@triton.jit
def softmax_online(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    col = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + col, start + col < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
        # A lane that has seen only -inf keeps a zero sum instead of exp(-inf - -inf).
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(value - base)
        peak = higher
    top = tl.max(peak, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    scale = tl.where(peak == -float("inf"), 0.0, tl.exp(base - top))
    inverse = 1.0 / tl.sum(total * scale, 0)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + col, start + col < n, other=-float("inf")).to(tl.float32)
        result = tl.exp(value - top) * inverse
        tl.store(y + start + col, result.to(y.dtype.element_ty), start + col < n)


def kernel_fn(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    n = x.shape[-1] if x.dim() else 1
    rows = x.numel() // n
    if n > FUSED_LIMIT:
        softmax_online[(rows,)](x, y, n, BLOCK=ONLINE_BLOCK, num_warps=8)
        return y
    block = max(16, triton.next_power_of_2(n))
    group = max(1, ROWS_BELOW // block)
    warps = min(32, max(1, group * block // (32 * ELEMENTS_PER_THREAD)))
    softmax_fused[(triton.cdiv(rows, group),)](x, y, rows, n, ROWS=group, BLOCK=block, num_warps=warps)
    return y

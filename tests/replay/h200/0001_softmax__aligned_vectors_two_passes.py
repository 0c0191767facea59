# target: softmax
# backend: triton
"""Softmax of long rows whose length is odd: 16-byte loads from the aligned address inside the row, second pass from L2.

A row of 50257 half-precision numbers starts at any even address, so masks and offsets that the compiler cannot prove
aligned cost it 2-byte accesses. Here the body of a row begins at the next multiple of eight elements and its mask is a
multiple of eight, so every access of the body is 16 bytes; the up to seven elements before and after go in one tile.
"""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {"BLOCK": [4096, 8192, 2048], "WARPS": [8, 16, 4]}
BLOCK = TUNABLES["BLOCK"][0]
WARPS = TUNABLES["WARPS"][0]


@triton.jit
def grow(peak, total, value):
    higher = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, total * tl.exp(peak - base) + tl.exp(value - base)


@triton.jit
def rows_of(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low = row * n
    high = low + n
    body = (low + 7) // 8 * 8
    size = tl.maximum(high // 8 * 8 - body, 0).to(tl.int32) // 8 * 8
    at = tl.arange(0, BLOCK)
    rim = tl.arange(0, 16)
    edge = tl.where(rim < 8, low + rim, body + size + (rim - 8))
    edge_mask = (edge < high) & ((rim >= 8) | (edge < body))
    source = x + body
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    whole = size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        value = tl.load(source + start + at, eviction_policy="evict_last").to(tl.float32)
        peak, total = grow(peak, total, value)
    value = tl.load(source + whole + at, whole + at < size, other=-float("inf")).to(tl.float32)
    peak, total = grow(peak, total, value)
    outer = tl.load(x + edge, edge_mask, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(peak, 0), tl.max(outer, 0), propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    scale = tl.where(peak == -float("inf"), 0.0, tl.exp(base - top))
    outer_sum = tl.sum(tl.where(edge_mask, tl.exp(outer - top), 0.0), 0)
    inverse = 1.0 / (tl.sum(total * scale, 0) + outer_sum)
    for start in range(0, whole, BLOCK):
        value = tl.load(source + start + at, eviction_policy="evict_first").to(tl.float32)
        result = tl.exp(value - top) * inverse
        tl.store(y + body + start + at, result.to(y.dtype.element_ty), eviction_policy="evict_first")
    value = tl.load(source + whole + at, whole + at < size, other=-float("inf")).to(tl.float32)
    result = tl.exp(value - top) * inverse
    tl.store(y + body + whole + at, result.to(y.dtype.element_ty), whole + at < size)
    tl.store(y + edge, (tl.exp(outer - top) * inverse).to(y.dtype.element_ty), edge_mask)


def kernel_fn(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    n = x.shape[-1] if x.dim() else 1
    rows = x.numel() // n
    block = min(BLOCK, max(16, triton.next_power_of_2(n)))
    rows_of[(rows,)](x, y, n, BLOCK=block, num_warps=max(1, min(WARPS, block // 256)))
    return y

# target: softmax
# backend: triton
"""Softmax that reads a long row once and keeps it in registers in its own 16 bits: 32 registers a thread for 64 values.

The second exponential is written as exp2(x·log2(e) - shift) with the division folded into the shift, so the compiler
cannot share it with the first and keep 64 floats alive instead. Accesses are 16 bytes wide as in the aligned variant.
"""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {"WARPS": [32, 16], "LARGEST": [65536, 32768]}
WARPS = TUNABLES["WARPS"][0]
LARGEST = TUNABLES["LARGEST"][0]  # a longer row, or one of 4-byte numbers, is read twice
LOG2_E = 1.4426950408889634


@triton.jit
def held(x, y, n, LOG2_E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low = row * n
    high = low + n
    body = (low + 7) // 8 * 8
    size = tl.maximum(high // 8 * 8 - body, 0).to(tl.int32) // 8 * 8
    at = tl.arange(0, BLOCK)
    rim = tl.arange(0, 16)
    edge = tl.where(rim < 8, low + rim, body + size + (rim - 8))
    edge_mask = (edge < high) & ((rim >= 8) | (edge < body))
    mask = at < size
    value = tl.load(x + body + at, mask, other=-float("inf"), eviction_policy="evict_first")
    outer = tl.load(x + edge, edge_mask, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(value.to(tl.float32), 0), tl.max(outer, 0), propagate_nan=tl.PropagateNan.ALL)
    total = tl.sum(tl.exp(value.to(tl.float32) - top), 0) + tl.sum(tl.where(edge_mask, tl.exp(outer - top), 0.0), 0)
    shift = top * LOG2_E + tl.log2(total)
    result = tl.exp2(value.to(tl.float32) * LOG2_E - shift)
    tl.store(y + body + at, result.to(y.dtype.element_ty), mask, eviction_policy="evict_first")
    tl.store(y + edge, tl.exp2(outer * LOG2_E - shift).to(y.dtype.element_ty), edge_mask)


@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    at = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + at, start + at < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(value - base)
        peak = higher
    top = tl.max(peak, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    scale = tl.where(peak == -float("inf"), 0.0, tl.exp(base - top))
    inverse = 1.0 / tl.sum(total * scale, 0)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + at, start + at < n, other=-float("inf")).to(tl.float32)
        tl.store(y + start + at, (tl.exp(value - top) * inverse).to(y.dtype.element_ty), start + at < n)


def kernel_fn(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    n = x.shape[-1] if x.dim() else 1
    rows = x.numel() // n
    block = max(16, triton.next_power_of_2(n))
    if block > LARGEST or (block > 16384 and x.element_size() > 2):
        twice[(rows,)](x, y, n, BLOCK=4096, num_warps=8)
    else:
        held[(rows,)](x, y, n, LOG2_E=LOG2_E, BLOCK=block, num_warps=max(1, min(WARPS, block // 1024)))
    return y

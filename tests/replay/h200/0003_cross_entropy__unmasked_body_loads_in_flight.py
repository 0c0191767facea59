# target: cross_entropy
# backend: triton
"""Mean cross-entropy: the body of a row is read without masks, two blocks at a time and pipelined, one maximum a pair.

The vocabulary is read once at memory speed only when several loads are under way: two independent loads come before the
first use, and one rescaling of the running sum serves both.
"""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {"BLOCK": [2048, 4096, 1024], "WARPS": [8, 4, 16]}
BLOCK = TUNABLES["BLOCK"][0]
WARPS = TUNABLES["WARPS"][0]
IGNORED = -100


@triton.jit
def grow(peak, total, one, two):
    higher = tl.maximum(one, two, propagate_nan=tl.PropagateNan.ALL)
    higher = tl.maximum(peak, higher, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, total * tl.exp(peak - base) + (tl.exp(one - base) + tl.exp(two - base))


@triton.jit
def row_losses(logits, targets, losses, n, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * n
    at = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    whole = n // (2 * BLOCK) * (2 * BLOCK)
    for start in range(0, whole, 2 * BLOCK):
        one = tl.load(logits + start + at, eviction_policy="evict_first")
        two = tl.load(logits + start + BLOCK + at, eviction_policy="evict_first")
        peak, total = grow(peak, total, one.to(tl.float32), two.to(tl.float32))
    one = tl.load(logits + whole + at, whole + at < n, other=-float("inf")).to(tl.float32)
    two = tl.load(logits + whole + BLOCK + at, whole + BLOCK + at < n, other=-float("inf")).to(tl.float32)
    peak, total = grow(peak, total, one, two)
    top = tl.max(peak, 0)
    scale = tl.where(peak == -float("inf"), 0.0, tl.exp(peak - top))
    chosen = tl.load(logits + target, (target >= 0) & (target < n), other=float("nan")).to(tl.float32)
    loss = (top - chosen) + tl.log(tl.sum(total * scale, 0))
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, loss))


@triton.jit
def mean_of_counted(losses, targets, mean, rows, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        mask = start + at < rows
        total += tl.load(losses + start + at, mask, other=0.0)
        count += (tl.load(targets + start + at, mask, other=IGNORED) != IGNORED).to(tl.int32)
    result = tl.sum(total, 0) / tl.sum(count, 0).to(tl.float32)
    tl.store(mean, result.to(mean.dtype.element_ty))


def kernel_fn(logits, targets):
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    logits, targets = logits.contiguous(), targets.contiguous()
    mean = torch.empty((), dtype=logits.dtype, device=logits.device)
    n, rows = logits.shape[-1], targets.numel()
    losses = torch.empty(max(rows, 1), dtype=torch.float32, device=logits.device)
    if rows:
        row_losses[(rows,)](logits, targets, losses, n, IGNORED=IGNORED, BLOCK=BLOCK, num_warps=WARPS)
    mean_of_counted[(1,)](losses, targets, mean, rows, IGNORED=IGNORED, BLOCK=4096, num_warps=8)
    return mean

"""Mean cross-entropy, integer targets: one read of the logits with a running maximum, then a mean in fixed order."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {"BLOCK": [2048, 4096, 8192, 1024], "WARPS": [4, 8, 16]}
BLOCK = TUNABLES["BLOCK"][0]
WARPS = TUNABLES["WARPS"][0]
IGNORED = -100  # torch.nn.functional.cross_entropy's default ignore_index


@triton.jit
def row_losses(logits, targets, losses, n, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * n
    col = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(logits + start + col, start + col < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
        # A lane that has seen only -inf keeps a zero sum instead of exp(-inf - -inf).
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(value - base)
        peak = higher
    top = tl.max(peak, 0)
    scale = tl.where(peak == -float("inf"), 0.0, tl.exp(peak - top))
    target = tl.load(targets + row)
    # A target outside the vocabulary has no logit: nan instead of a read out of bounds.
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
    """Mean loss of logits [..., classes] (or [N, classes, ...], as PyTorch has it) for int64 targets."""
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

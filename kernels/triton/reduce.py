"""Sum over the last dimension in float32, bitwise deterministic; few long rows are split and added in a fixed order."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "BLOCK": [4096, 2048, 1024, 8192],
    "WARPS": [8, 4, 2],
    "TILE": [4096, 2048, 8192],  # elements a program handles when rows are short
    "PROGRAMS": [1056, 528, 2112],  # programs wanted before a row is split
}
BLOCK = TUNABLES["BLOCK"][0]
WARPS = TUNABLES["WARPS"][0]
TILE = TUNABLES["TILE"][0]
PROGRAMS = TUNABLES["PROGRAMS"][0]


@triton.jit
def sum_rows(x, y, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (col < n) & (first + row < rows)[:, None]
    value = tl.load(x + first * n + row[:, None] * n + col, mask, other=0.0).to(tl.float32)
    tl.store(y + first + row, tl.sum(value, 1).to(y.dtype.element_ty), first + row < rows)


@triton.jit
def sum_long(x, y, n, part, parts, BLOCK: tl.constexpr):
    """Program (row, p) adds columns p*part .. (p+1)*part of its row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * part
    stop = tl.minimum(start + part, n)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(start, stop, BLOCK):
        total += tl.load(x + row * n + at + col, at + col < stop, other=0.0).to(tl.float32)
    tl.store(y + row * parts + tl.program_id(1), tl.sum(total, 0).to(y.dtype.element_ty))


def launch_long(x, y, rows, n, parts):
    part = triton.cdiv(triton.cdiv(n, parts), BLOCK) * BLOCK
    sum_long[(rows, parts)](x, y, n, part, parts, BLOCK=BLOCK, num_warps=WARPS)


def kernel_fn(x):
    x = x.contiguous()
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    n = x.shape[-1] if x.dim() else 1
    if x.numel() == 0:
        return y.zero_()
    rows = y.numel()
    if n <= BLOCK:
        block = max(16, triton.next_power_of_2(n))
        group = max(1, TILE // block)
        sum_rows[(triton.cdiv(rows, group),)](x, y, rows, n, ROWS=group, BLOCK=block, num_warps=WARPS)
        return y
    parts = min(65535, triton.cdiv(n, BLOCK), max(1, PROGRAMS // rows))
    if parts == 1:
        launch_long(x, y, rows, n, 1)
        return y
    # Partial sums stay in float32 and a second launch adds them in a fixed order: no atomics.
    partial = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
    launch_long(x, partial, rows, n, parts)
    launch_long(partial, y, rows, parts, 1)
    return y

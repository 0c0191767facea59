"""Rotary embedding of interleaved pairs: a program rotates several heads with one read of cos and sin."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "TILE": [2048, 4096, 1024],
    "HEADS": [2, 4, 8],
    "WARPS": [8, 4],
}
TILE = TUNABLES["TILE"][0]  # elements of one head per program
HEADS = TUNABLES["HEADS"][0]
WARPS = TUNABLES["WARPS"][0]


@triton.jit
def rotate_pairs(x, cos, sin, y, planes, seq, half, ROWS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Program (i, j) rotates positions i*ROWS.. of planes (batch and head flattened) j*HEADS.. ."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    both = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    mask = (row < seq) & (both < 2 * half)
    c = tl.load(cos + row * half + pair, (row < seq) & (pair < half), other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + pair, (row < seq) & (pair < half), other=0.0).to(tl.float32)
    first = tl.program_id(1).to(tl.int64) * HEADS
    for head in tl.static_range(HEADS):
        start = (first + head) * seq * (2 * half)
        inside = mask & (first + head < planes)
        value = tl.load(x + start + row * (2 * half) + both, inside, other=0.0)
        even, odd = tl.split(tl.reshape(value, [ROWS, HALF, 2]))
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, 2 * HALF])
        tl.store(y + start + row * (2 * half) + both, rotated.to(y.dtype.element_ty), inside)


def kernel_fn(x, cos, sin):
    """Rotate x [..., S, D] by cos and sin [S, D/2]."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    if x.numel() == 0:
        return y
    seq, half = x.shape[-2], x.shape[-1] // 2
    planes = x.numel() // (2 * half * seq)
    width = triton.next_power_of_2(half)
    rows = max(1, TILE // (2 * width))
    heads = HEADS if planes >= HEADS else 1
    grid = (triton.cdiv(seq, rows), triton.cdiv(planes, heads))
    rotate_pairs[grid](x, cos, sin, y, planes, seq, half, ROWS=rows, HALF=width, HEADS=heads, num_warps=WARPS)
    return y

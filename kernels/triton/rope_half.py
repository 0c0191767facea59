"""Rotary embedding with rotated halves, as in Hugging Face: a program rotates several heads of a tile of positions."""

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
def rotate_halves(
    x, cos, sin, y, x_b, x_h, x_s, y_b, y_h, y_s, table_b, table_s, heads, seq, half,
    ROWS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (i, j, b) rotates positions i*ROWS.. of heads j*HEADS.. of batch b."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, HALF)[None, :]
    mask = (row < seq) & (col < half)
    batch = tl.program_id(2).to(tl.int64)
    at = batch * table_b + row * table_s + col
    low_c = tl.load(cos + at, mask, other=0.0).to(tl.float32)
    high_c = tl.load(cos + at + half, mask, other=0.0).to(tl.float32)
    low_s = tl.load(sin + at, mask, other=0.0).to(tl.float32)
    high_s = tl.load(sin + at + half, mask, other=0.0).to(tl.float32)
    source = x + batch * x_b + row.to(tl.int64) * x_s + col
    target = y + batch * y_b + row.to(tl.int64) * y_s + col
    for i in tl.static_range(HEADS):
        head = (tl.program_id(1) * HEADS + i).to(tl.int64)
        inside = mask & (head < heads)
        low = tl.load(source + head * x_h, inside, other=0.0).to(tl.float32)
        high = tl.load(source + head * x_h + half, inside, other=0.0).to(tl.float32)
        tl.store(target + head * y_h, (low * low_c - high * low_s).to(y.dtype.element_ty), inside)
        tl.store(
            target + head * y_h + half,
            (high * high_c + low * high_s).to(y.dtype.element_ty),
            inside,
        )


def table(values, seq):
    """Cos or sin [.., S, D] as [1 or B, S, D], contiguous."""
    return values.reshape(-1, seq, values.shape[-1]).contiguous()


def rotate(x, cos, sin):
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    batches, heads, seq, dim = x.shape
    if y.numel() == 0:
        return y
    x = x if x.stride(3) == 1 else x.contiguous()
    y = y if y.stride(3) == 1 else torch.empty_like(x, dtype=y.dtype)
    half = dim // 2
    width = triton.next_power_of_2(half)
    rows = max(1, TILE // (2 * width))
    group = HEADS if heads >= HEADS else 1
    rotate_halves[(triton.cdiv(seq, rows), triton.cdiv(heads, group), batches)](
        x, cos, sin, y, *x.stride()[:3], *y.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, dim,
        heads, seq, half, ROWS=rows, HALF=width, HEADS=group, num_warps=WARPS,
    )  # fmt: skip
    return y


def kernel_fn(x, cos, sin):
    """x·cos + rotate_half(x)·sin for x [B, H, S, D] and cos, sin [S, D], [B or 1, S, D] or [B or 1, 1, S, D]."""
    return rotate(x, table(cos, x.shape[2]), table(sin, x.shape[2]))

"""Rotary embedding by complex multiplication (Meta LLaMA code), float32 inside: x [B, S, H, D], complex64 [S, D/2]."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {"TILE": [4096, 2048, 8192], "WARPS": [4, 8]}
TILE = TUNABLES["TILE"][0]  # elements of x per program
WARPS = TUNABLES["WARPS"][0]


@triton.jit
def rotate_complex(x, turns, y, heads, seq, half, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Program (i, p) rotates heads i*ROWS.. of position p (batch and sequence flattened)."""
    place = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    both = tl.arange(0, 2 * HALF)
    inside = (head < heads) & (both < 2 * half)[None, :]
    offset = place * heads * (2 * half) + head * (2 * half) + both[None, :]
    value = tl.load(x + offset, inside, other=0.0)
    even, odd = tl.split(tl.reshape(value, [ROWS, HALF, 2]))
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    turn = tl.load(turns + place % seq * (2 * half) + both, both < 2 * half, other=0.0)
    real, imaginary = tl.split(tl.reshape(turn, [HALF, 2]))
    real, imaginary = real[None, :], imaginary[None, :]
    rotated = tl.join(even * real - odd * imaginary, even * imaginary + odd * real)
    tl.store(y + offset, tl.reshape(rotated, [ROWS, 2 * HALF]).to(y.dtype.element_ty), inside)


def rotate(x, turns):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    batches, seq, heads, dim = x.shape
    width = triton.next_power_of_2(dim)
    rows = min(triton.next_power_of_2(heads), max(1, TILE // width))
    grid = (triton.cdiv(heads, rows), batches * seq)
    rotate_complex[grid](x, turns, y, heads, seq, dim // 2, ROWS=rows, HALF=width // 2, num_warps=WARPS)
    return y


def table(rotations):
    """Complex64 [S, D/2] (or float32 [S, D/2, 2], with or without dimensions of one) as contiguous float32."""
    return (torch.view_as_real(rotations) if rotations.is_complex() else rotations).contiguous()


def kernel_fn(x, rotations):
    """Rotate the interleaved pairs of x [B, S, H, D] by complex64 rotations [S, D/2]; contiguous, in x's dtype."""
    return rotate(x, table(rotations))

"""Attention without the score matrix: online softmax in base 2, unmasked blocks first and only the diagonal masked."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, warps, stages) for 16-bit inputs with head size up to 128
    "TILE": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3)],
    "TILE_WIDE": [(64, 64, 8, 2), (64, 32, 4, 2)],  # head size above 128
    "TILE_FLOAT32": [(64, 16, 8, 2), (32, 16, 8, 2)],
}
TILE = TUNABLES["TILE"][0]
TILE_WIDE = TUNABLES["TILE_WIDE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
LOG2_E = 1.4426950408889634


@triton.jit
def attend_blocks(
    total, peak, norm, query, k_at, v_at, k_s, v_s, start, stop, keys, row, scale, dim, d,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Fold keys start..stop into the running (total, peak, norm) of one tile of queries."""
    col = tl.arange(0, BLOCK_N)
    for first in range(start, stop, BLOCK_N):
        at = tl.multiple_of(first, BLOCK_N)
        inside = at + col < keys
        k_ptr = k_at + at.to(tl.int64) * k_s
        v_ptr = v_at + at.to(tl.int64) * v_s
        if MASKED:
            key = tl.load(k_ptr, inside[None, :] & (d[:, None] < dim), other=0.0)
        elif EVEN_D:
            key = tl.load(k_ptr)
        else:
            key = tl.load(k_ptr, d[:, None] < dim, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (row[:, None] >= at + col[None, :])
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # Rows that have seen only -inf keep a zero sum instead of exp2(-inf - -inf).
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        norm = norm * fade + tl.sum(weight, 1)
        total = total * fade[:, None]
        if MASKED:
            value = tl.load(v_ptr, inside[:, None] & (d[None, :] < dim), other=0.0)
        elif EVEN_D:
            value = tl.load(v_ptr)
        else:
            value = tl.load(v_ptr, d[None, :] < dim, other=0.0)
        total = tl.dot(weight.to(value.dtype), value, total, input_precision="ieee")
        peak = higher
    return total, peak, norm


@triton.jit
def attention_tile(
    q, k, v, out, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    heads, group, queries, keys, dim, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes queries tile i, the longest causal tiles first, of (batch, head) pair j."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    mask = (row < queries)[:, None] & (d < dim)[None, :]
    q_at = q + batch * q_b + head * q_h + row.to(tl.int64)[:, None] * q_s + d[None, :] * q_d
    query = tl.load(q_at, mask, other=0.0)
    k_at = k + batch * k_b + head // group * k_h + col.to(tl.int64)[None, :] * k_s + d[:, None] * k_d
    v_at = v + batch * v_b + head // group * v_h + col.to(tl.int64)[:, None] * v_s + d[None, :] * v_d
    total = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    stop = keys
    full = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(keys, (tile + 1) * BLOCK_M)
        full = tl.minimum(full, tile * BLOCK_M // BLOCK_N * BLOCK_N)
    total, peak, norm = attend_blocks(
        total, peak, norm, query, k_at, v_at, k_s, v_s, 0, full, keys, row, scale, dim, d,
        BLOCK_N, False, CAUSAL, EVEN_D,
    )  # fmt: skip
    total, peak, norm = attend_blocks(
        total, peak, norm, query, k_at, v_at, k_s, v_s, full, stop, keys, row, scale, dim, d,
        BLOCK_N, True, CAUSAL, EVEN_D,
    )  # fmt: skip
    start = tl.program_id(1).to(tl.int64) * queries
    out_at = out + (start + row)[:, None] * dim + d[None, :]
    tl.store(out_at, (total / norm[:, None]).to(out.dtype.element_ty), mask)


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    """Attention of Q [B, H, S, D] over K, V [B, H or fewer, T, D]; causal counts positions from the first key."""
    batches, heads, queries, dim = Q.shape
    keys = K.shape[2]
    out = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    if out.numel() == 0:
        return out
    scale = (dim**-0.5 if sm_scale is None else sm_scale) * LOG2_E
    width = max(16, triton.next_power_of_2(dim))
    tile = TILE_FLOAT32 if Q.dtype == torch.float32 else TILE if width <= 128 else TILE_WIDE
    block_m, block_n, warps, stages = tile
    attention_tile[(triton.cdiv(queries, block_m), batches * heads)](
        Q, K, V, out, *Q.stride(), *K.stride(), *V.stride(),
        heads, heads // K.shape[1], queries, keys, dim, scale,
        BLOCK_M=block_m, BLOCK_N=block_n, D=width, CAUSAL=causal, EVEN_D=width == dim,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out

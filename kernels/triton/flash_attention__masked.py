"""Attention under a mask of any form: each tile of queries first finds the keys that its mask lets through.

Keys beyond the last visible one are never read, and the leading ones that all rows see are taken without a mask, so a
causal, a windowed and a padded mask each cost about what their visible part costs, and no form of mask is assumed.
"""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, warps, stages) for 16-bit inputs with head size up to 128
    "TILE": [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 4), (128, 128, 8, 2)],
    "TILE_WIDE": [(64, 32, 4, 2), (64, 64, 8, 2)],  # head size above 128
    "TILE_FLOAT32": [(32, 16, 8, 2), (64, 16, 8, 2)],
}
TILE = TUNABLES["TILE"][0]
TILE_WIDE = TUNABLES["TILE_WIDE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
LOG2_E = 1.4426950408889634
FREE, CAUSAL, BOOLEAN, ADDITIVE = 0, 1, 2, 3


@triton.jit
def visible(mask_at, mask_k, rows, keys, BLOCK_N: tl.constexpr, FORM: tl.constexpr):
    """How many leading keys all rows see, in whole tiles, and where the last tile ends that any row sees."""
    col = tl.arange(0, BLOCK_N)
    full, stop, leading = 0, 0, 1
    for at in range(0, keys, BLOCK_N):
        inside = rows[:, None] & (at + col < keys)[None, :]
        tile = mask_at + (at + col).to(tl.int64)[None, :] * mask_k
        if FORM == 2:
            seen = tl.load(tile, inside, other=0).to(tl.int32)
            open_ = tl.where(inside, seen, 1)
        else:
            bias = tl.load(tile, inside, other=0.0).to(tl.float32)
            seen = (inside & (bias != -float("inf"))).to(tl.int32)
            open_ = (bias == 0.0).to(tl.int32)
        leading = leading & tl.min(tl.min(open_, 1), 0) & (at + BLOCK_N <= keys).to(tl.int32)
        full = tl.where(leading != 0, at + BLOCK_N, full)
        stop = tl.where(tl.max(tl.max(seen, 1), 0) != 0, at + BLOCK_N, stop)
    return full, tl.minimum(stop, keys)


@triton.jit
def attend(
    total, peak, norm, query, k_at, v_at, k_s, v_s, mask_at, mask_k, start, stop, keys, rows, row, scale, d_inside,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Fold keys start..stop into the running (total, peak, norm) of one tile of queries; scores are in base 2."""
    col = tl.arange(0, BLOCK_N)
    for first in range(start, stop, BLOCK_N):
        at = tl.multiple_of(first, BLOCK_N)
        inside = at + col < keys
        k_ptr = k_at + at.to(tl.int64) * k_s
        v_ptr = v_at + at.to(tl.int64) * v_s
        if MASKED:
            key = tl.load(k_ptr, inside[None, :] & d_inside[:, None], other=0.0)
        elif EVEN_D:
            key = tl.load(k_ptr)
        else:
            key = tl.load(k_ptr, d_inside[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if MASKED:
            seen = inside[None, :]
            if FORM == 1:
                seen = seen & (row[:, None] >= at + col[None, :])
            if FORM == 2:
                tile = mask_at + (at + col).to(tl.int64)[None, :] * mask_k
                seen = seen & (tl.load(tile, rows[:, None] & inside[None, :], other=0) != 0)
            if FORM == 3:
                tile = mask_at + (at + col).to(tl.int64)[None, :] * mask_k
                score += tl.load(tile, rows[:, None] & inside[None, :], other=0.0).to(tl.float32) * 1.4426950408889634
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # Rows that have seen only -inf keep a zero sum instead of exp2(-inf - -inf).
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        norm = norm * fade + tl.sum(weight, 1)
        total = total * fade[:, None]
        if MASKED:
            value = tl.load(v_ptr, inside[:, None] & d_inside[None, :], other=0.0)
        elif EVEN_D:
            value = tl.load(v_ptr)
        else:
            value = tl.load(v_ptr, d_inside[None, :], other=0.0)
        total = tl.dot(weight.to(value.dtype), value, total, input_precision="ieee")
        peak = higher
    return total, peak, norm


@triton.jit
def attention_tile(
    q, k, v, mask, out, q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_q, m_k,
    o_b, o_h, o_s, heads, group, queries, keys, dim, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes queries tile i, the last tiles first, of (batch, head) pair j."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < queries
    col = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    inside = rows[:, None] & (d < dim)[None, :]
    q_at = q + batch * q_b + head * q_h + row.to(tl.int64)[:, None] * q_s + d[None, :] * q_d
    query = tl.load(q_at, inside, other=0.0)
    k_at = k + batch * k_b + head // group * k_h + col.to(tl.int64)[None, :] * k_s + d[:, None] * k_d
    v_at = v + batch * v_b + head // group * v_h + col.to(tl.int64)[:, None] * v_s + d[None, :] * v_d
    mask_at = mask + batch * m_b + head * m_h + row.to(tl.int64)[:, None] * m_q
    full, stop = keys // BLOCK_N * BLOCK_N, keys
    if FORM == 1:
        stop = tl.minimum(keys, (tile + 1) * BLOCK_M)
        full = tl.minimum(full, tile * BLOCK_M // BLOCK_N * BLOCK_N)
    if FORM >= 2:
        full, stop = visible(mask_at, m_k, rows, keys, BLOCK_N, FORM)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    total, peak, norm = attend(
        total, peak, norm, query, k_at, v_at, k_s, v_s, mask_at, m_k, 0, full, keys, rows, row, scale, d < dim,
        BLOCK_N, False, FORM, EVEN_D,
    )  # fmt: skip
    total, peak, norm = attend(
        total, peak, norm, query, k_at, v_at, k_s, v_s, mask_at, m_k, full, stop, keys, rows, row, scale, d < dim,
        BLOCK_N, True, FORM, EVEN_D,
    )  # fmt: skip
    out_at = out + batch * o_b + head * o_h + row.to(tl.int64)[:, None] * o_s + d[None, :]
    tl.store(out_at, (total / norm[:, None]).to(out.dtype.element_ty), inside)


def kernel_fn(Q, K, V, causal=True, sm_scale=None, attn_mask=None):
    """Attention of Q [B, H, S, D] over K, V [B, H or fewer, T, D].

    `attn_mask`, broadcast to [B, H, S, T], is boolean (True: seen) or added to the scores. A row that sees nothing is
    NaN, as softmax of -inf alone is.
    """
    batches, heads, queries, dim = Q.shape
    keys = K.shape[2]
    if Q.stride(1) < Q.stride(2):  # heads beside each other, as a projection leaves them: so the result's, too
        out = torch.empty((batches, queries, heads, dim), dtype=Q.dtype, device=Q.device).transpose(1, 2)
    else:
        out = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    if out.numel() == 0:
        return out
    form, mask = (CAUSAL if causal else FREE), Q
    mask_strides = (0, 0, 0, 0)
    if attn_mask is not None:
        form = BOOLEAN if attn_mask.dtype == torch.bool else ADDITIVE
        mask = attn_mask.expand(batches, heads, queries, keys)
        mask_strides = mask.stride()
        mask = mask.view(torch.uint8) if form == BOOLEAN else mask
    width = max(16, triton.next_power_of_2(dim))
    tile = TILE_FLOAT32 if Q.dtype == torch.float32 else TILE if width <= 128 else TILE_WIDE
    block_m, block_n, warps, stages = tile
    scale = (dim**-0.5 if sm_scale is None else sm_scale) * LOG2_E
    attention_tile[(triton.cdiv(queries, block_m), batches * heads)](
        Q, K, V, mask, out, *Q.stride(), *K.stride(), *V.stride(), *mask_strides, *out.stride()[:3],
        heads, heads // K.shape[1], queries, keys, dim, scale,
        BLOCK_M=block_m, BLOCK_N=block_n, D=width, FORM=form, EVEN_D=width == dim, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out

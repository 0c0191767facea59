"""Attention without the score matrix: online softmax in base 2, unmasked blocks first and only the diagonal masked."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, warps, stages) for 16-bit inputs with head size up to 128
    "TILE": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3)],
    "TILE_WIDE": [(64, 64, 8, 2), (64, 32, 4, 2)],  # head size above 128
    "DESCRIPTORS": [1, 0],  # load through Hopper's copy engine where shapes allow it
    "DESCRIBED": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 3)],
    "TILE_FLOAT32": [(64, 16, 8, 2), (32, 16, 8, 2)],
}
TILE = TUNABLES["TILE"][0]
TILE_WIDE = TUNABLES["TILE_WIDE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
DESCRIPTORS = TUNABLES["DESCRIPTORS"][0]
DESCRIBED = TUNABLES["DESCRIBED"][0]
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


@triton.jit
def attend_described(
    total, peak, norm, query, k, v, base, start, stop, row, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As attend_blocks, for descriptors and whole blocks; MASKED: the blocks on the diagonal."""
    col = tl.arange(0, BLOCK_N)
    for at in range(start, stop, BLOCK_N):
        score = tl.dot(query, k.load([base + at, 0]).T) * scale
        if MASKED:
            score = tl.where(row[:, None] >= at + col[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        floor = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - floor[:, None])
        fade = tl.exp2(peak - floor)
        norm = norm * fade + tl.sum(weight, 1)
        value = v.load([base + at, 0])
        total = tl.dot(weight.to(value.dtype), value, total * fade[:, None])
        peak = higher
    return total, peak, norm


@triton.jit
def attention_descriptor(
    q, k, v, out, heads, group, queries, keys, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """attention_tile for contiguous 16-bit tensors of whole tiles, through Hopper's copy engine."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    pair = tl.program_id(1)
    base = (pair // heads * (heads // group) + pair % heads // group) * keys
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = q.load([pair * queries + tile * BLOCK_M, 0])
    total = tl.zeros([BLOCK_M, D], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    full = keys
    if CAUSAL:
        full = tl.minimum(keys, tile * BLOCK_M)
    total, peak, norm = attend_described(
        total, peak, norm, query, k, v, base, 0, full, row, scale, BLOCK_N, False
    )  # fmt: skip
    if CAUSAL:
        stop = tl.minimum(keys, (tile + 1) * BLOCK_M)
        total, peak, norm = attend_described(
            total, peak, norm, query, k, v, base, full, stop, row, scale, BLOCK_N, True
        )  # fmt: skip
    out.store([pair * queries + tile * BLOCK_M, 0], (total / norm[:, None]).to(out.dtype))


def described(Q, K, V, out):
    """Q, K, V and out as matrices of rows for descriptors, or None where the device or the tensors rule it out."""
    dim, tensors = Q.shape[3], (Q, K, V, out)
    if not DESCRIPTORS or Q.element_size() != 2 or dim not in (64, 128):
        return None
    if Q.shape[2] % DESCRIBED[0] or K.shape[2] % max(DESCRIBED[:2]) or DESCRIBED[0] % DESCRIBED[1]:
        return None
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
        return None
    if torch.cuda.get_device_capability(Q.device) < (9, 0) or any(t.numel() // dim >= 2**31 for t in tensors):
        return None
    blocks = (DESCRIBED[0], DESCRIBED[1], DESCRIBED[1], DESCRIBED[0])
    return [TensorDescriptor.from_tensor(t.view(-1, dim), [b, dim]) for t, b in zip(tensors, blocks, strict=True)]


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    """Attention of Q [B, H, S, D] over K, V [B, H or fewer, T, D]; causal counts positions from the first key."""
    batches, heads, queries, dim = Q.shape
    keys = K.shape[2]
    out = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    if out.numel() == 0:
        return out
    scale = (dim**-0.5 if sm_scale is None else sm_scale) * LOG2_E
    if tensors := described(Q, K, V, out):
        block_m, block_n, warps, stages = DESCRIBED
        attention_descriptor[(queries // block_m, batches * heads)](
            *tensors, heads, heads // K.shape[1], queries, keys, scale,
            BLOCK_M=block_m, BLOCK_N=block_n, D=dim, CAUSAL=causal, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out
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

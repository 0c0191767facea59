"""Matrix product: tiles visited in groups that share rows of A in L2, float32 sums, true float32 for float32 inputs."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) for 16-bit inputs
    "TILE": [
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 256, 64, 8, 4),
        (64, 256, 64, 4, 4),
        (64, 128, 64, 4, 4),
    ],
    "TILE_FLOAT32": [(64, 128, 16, 8, 3), (128, 128, 16, 8, 3), (64, 64, 16, 4, 3)],
    "GROUP": [8, 4, 16],
    "DESCRIPTORS": [1, 0],  # load through Hopper's copy engine where strides allow it
}
TILE = TUNABLES["TILE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
SMALL_TILE = (64, 64, 64, 4, 4)  # when the large tile leaves most of the device idle
GROUP = TUNABLES["GROUP"][0]
DESCRIPTORS = TUNABLES["DESCRIPTORS"][0]


@triton.jit
def matmul_tile(
    a, b, c, m, n, k, a_batch, a_m, a_k, b_batch, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + pid % (GROUP * tiles_n) % height
    tile_n = pid % (GROUP * tiles_n) // height
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the edge wrap around: they read valid memory and are not stored.
    a_row = (row if EVEN_M else row % m).to(tl.int64)
    b_col = (col if EVEN_N else col % n).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + batch * a_batch + a_row[:, None] * a_m + inner[None, :] * a_k
    b_at = b + batch * b_batch + inner[:, None] * b_k + b_col[None, :] * b_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a_at), tl.load(b_at)
        else:
            left = tl.load(a_at, inner[None, :] < k - start, other=0.0)
            right = tl.load(b_at, inner[:, None] < k - start, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    c_at = c + batch * m * n + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(c_at, total.to(c.dtype.element_ty), (row < m)[:, None] & (col < n)[None, :])


@triton.jit
def matmul_descriptor(
    a, b, c, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """The same through tensor descriptors (Hopper's copy engine); BY_ROWS: b is stored as [n, k]."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    row = (first + pid % (GROUP * tiles_n) % height) * BLOCK_M
    col = pid % (GROUP * tiles_n) // height * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = a.load([row, start])
        right = b.load([col, start]).T if BY_ROWS else b.load([start, col])
        total = tl.dot(left, right, total)
    c.store([row, col], total.to(c.dtype))


def tile_for(a, m, n, batches):
    if a.dtype == torch.float32:
        return TILE_FLOAT32
    programs = batches * triton.cdiv(m, TILE[0]) * triton.cdiv(n, TILE[1])
    return TILE if programs >= 64 else SMALL_TILE


def batched(a, b):
    """A [B, M, K] and B [B, K, N] as views (stride 0 where broadcast), for operands of two or more dimensions."""
    if b.dim() == 2 and a.dim() > 2:
        return a.flatten(0, -2).unsqueeze(0), b.unsqueeze(0)
    outer = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*outer, *a.shape[-2:]), b.expand(*outer, *b.shape[-2:])
    return (a.unsqueeze(0), b.unsqueeze(0)) if a.dim() == 2 else (a.flatten(0, -3), b.flatten(0, -3))


def describable(x):
    """Whether a descriptor can walk the matrix x: 16-bit, rows contiguous, everything on 16-byte boundaries."""
    dense = x.stride(1) == 1 and x.stride(0) >= x.shape[1]  # not a row expanded over all
    return x.element_size() == 2 and dense and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def multiply_described(a, b, c):
    """c = a @ b through descriptors when the device and the operands allow it; says whether it did."""
    by_rows = b.stride(0) == 1
    stored = b.T if by_rows else b
    if not (DESCRIPTORS and all(describable(x) for x in (a, stored, c))):
        return False
    if torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n, block_k, warps, stages = tile_for(a, m, n, 1)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    matmul_descriptor[grid](
        TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(stored, [block_n, block_k] if by_rows else [block_k, block_n]),
        TensorDescriptor.from_tensor(c, [block_m, block_n]),
        m, n, k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP, BY_ROWS=by_rows,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return True


def kernel_fn(A, B):
    """A @ B with torch.matmul's shapes: 2-D, 1-D and broadcast batches."""
    a = A.unsqueeze(0) if A.dim() == 1 else A
    b = B.unsqueeze(1) if B.dim() == 1 else B
    left, right = batched(a, b)
    batches, m, k = left.shape
    n = right.shape[-1]
    outer = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*outer, *([a.shape[-2]] if A.dim() > 1 else []), *([n] if B.dim() > 1 else []))
    c = torch.empty(shape, dtype=A.dtype, device=A.device)
    if c.numel() == 0 or k == 0:
        return c.zero_()
    if batches == 1 and multiply_described(left[0], right[0], c.view(m, n)):
        return c
    block_m, block_n, block_k, warps, stages = tile_for(a, m, n, batches)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), batches)
    matmul_tile[grid](
        left, right, c, m, n, k, *left.stride(), *right.stride(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP, EVEN_K=k % block_k == 0,
        EVEN_M=m % block_m == 0, EVEN_N=n % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return c

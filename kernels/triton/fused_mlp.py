"""Gated MLP in two launches: gate and up share each read of x and end in SiLU(gate)·up; the down projection follows."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) for 16-bit inputs; the gated tile has two accumulators
    "GATED_TILE": [(128, 64, 64, 4, 4), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3)],
    "DOWN_TILE": [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4)],
    "TILE_FLOAT32": [(64, 64, 16, 8, 3), (64, 128, 16, 8, 3)],
    "GROUP": [8, 4, 16],
    "DESCRIPTORS": [1, 0],  # load through Hopper's copy engine where strides allow it
}
GATED_TILE = TUNABLES["GATED_TILE"][0]
DOWN_TILE = TUNABLES["DOWN_TILE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
SMALL_TILE = (64, 64, 64, 4, 4)  # when the large tile leaves most of the device idle
GROUP = TUNABLES["GROUP"][0]
DESCRIPTORS = TUNABLES["DESCRIPTORS"][0]


@triton.jit
def linear_tile(
    x, first, second, y, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """y = x·firstᵀ, or SiLU(x·firstᵀ)·(x·secondᵀ) when GATED; weights are [n, k], all operands contiguous."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    top = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - top, GROUP)
    row = (top + pid % (GROUP * tiles_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = pid % (GROUP * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the edge wrap around: they read valid memory and are not stored.
    x_row = (row % m).to(tl.int64)
    w_row = (col % n).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + x_row[:, None] * k + inner[None, :]
    w_offset = w_row[None, :] * k + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(x_at + start), tl.load(first + w_offset + start)
        else:
            left = tl.load(x_at + start, inner[None, :] < k - start, other=0.0)
            right = tl.load(first + w_offset + start, inner[:, None] < k - start, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if GATED:
            if EVEN_K:
                right = tl.load(second + w_offset + start)
            else:
                right = tl.load(second + w_offset + start, inner[:, None] < k - start, other=0.0)
            other = tl.dot(left, right, other, input_precision="ieee")
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * n + col[None, :], total.to(y.dtype.element_ty), mask)


@triton.jit
def linear_descriptor(
    x, first, second, y, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The same through tensor descriptors (Hopper's copy engine)."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    top = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - top, GROUP)
    row = (top + pid % (GROUP * tiles_n) % height) * BLOCK_M
    col = pid % (GROUP * tiles_n) // height * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = x.load([row, start])
        total = tl.dot(left, first.load([col, start]).T, total)
        if GATED:
            other = tl.dot(left, second.load([col, start]).T, other)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    y.store([row, col], total.to(y.dtype))


def describable(*tensors):
    """Whether descriptors can walk these matrices: Hopper, 16-bit, rows and base on 16-byte boundaries."""
    if not DESCRIPTORS or torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return False
    return all(t.element_size() == 2 and t.shape[1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def linear(x, first, second, tile, gated):
    (m, k), n = x.shape, first.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if x.dtype == torch.float32:
        tile = TILE_FLOAT32
    elif triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]) < 64:
        tile = SMALL_TILE
    block_m, block_n, block_k, warps, stages = tile
    if k and describable(x, first, second, y):
        linear_descriptor[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            TensorDescriptor.from_tensor(x, [block_m, block_k]),
            TensorDescriptor.from_tensor(first, [block_n, block_k]),
            TensorDescriptor.from_tensor(second, [block_n, block_k]),
            TensorDescriptor.from_tensor(y, [block_m, block_n]),
            m, n, k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP, GATED=gated,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return y
    linear_tile[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        x, first, second, y, m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP, EVEN_K=k % block_k == 0, GATED=gated,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def kernel_fn(x, w_gate, w_up, w_down):
    """SiLU(x·w_gateᵀ)·(x·w_upᵀ)·w_downᵀ for x [..., in] and weights [out, in]."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    hidden = linear(flat, w_gate.contiguous(), w_up.contiguous(), GATED_TILE, gated=True)
    down = w_down.contiguous()
    return linear(hidden, down, down, DOWN_TILE, gated=False).view(*x.shape[:-1], w_down.shape[0])

"""Linear layer whose epilogue adds the bias and applies GELU (erf or tanh) before the one store of each tile."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    # (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) for 16-bit inputs
    "TILE": [
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 32, 8, 4),
        (128, 64, 64, 4, 3),
        (64, 128, 64, 4, 4),
    ],
    "TILE_FLOAT32": [(64, 128, 16, 8, 3), (64, 64, 16, 4, 3)],
    "GROUP": [8, 4, 16],
    "DESCRIPTORS": [0, 1],  # load through Hopper's copy engine where strides allow it
}
TILE = TUNABLES["TILE"][0]
TILE_FLOAT32 = TUNABLES["TILE_FLOAT32"][0]
GROUP = TUNABLES["GROUP"][0]
DESCRIPTORS = TUNABLES["DESCRIPTORS"][0]
SMALL_TILE = (64, 64, 64, 4, 4)  # when the large tile leaves most of the device idle


@triton.jit
def gelu(value, TANH: tl.constexpr, EXACT: tl.constexpr):
    if TANH:
        # x·sigmoid(2u) is x·(1 + tanh(u))/2 without cancellation for large negative u.
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        result = value / (1.0 + tl.exp(-2.0 * inner))
        return tl.where(value == -float("inf"), float("nan"), result)  # -inf · 0, as PyTorch has it
    elif EXACT:  # noqa: RET505 - the compiler takes one branch only
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        # Tail of the normal distribution by Abramowitz and Stegun 7.1.26: absolute error 1.5e-7 at half of erf's cost.
        t = 1.0 / (1.0 + 0.23164190 * tl.abs(value))
        tail = t * (-0.142248368 + t * (0.710706871 + t * (-0.726576013 + t * 0.530702715)))
        tail = (0.127414796 + tail) * t * tl.exp2(-0.7213475204444817 * value * value)
        return value * tl.where(value < 0, tail, 1.0 - tail)


@triton.jit
def linear_tile(
    x, weight, bias, y, m, n, k, x_row, weight_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, TANH: tl.constexpr, EXACT: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """y [m, n] = gelu(x·weightᵀ + bias); x, weight and y are tensor descriptors when DESCRIBED."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    top = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - top, GROUP)
    first_row = (top + pid % (GROUP * tiles_n) % height) * BLOCK_M
    first_col = pid % (GROUP * tiles_n) // height * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    col = first_col + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DESCRIBED:
        for start in range(0, k, BLOCK_K):
            total = tl.dot(x.load([first_row, start]), weight.load([first_col, start]).T, total)
    else:
        inner = tl.arange(0, BLOCK_K)
        # Rows past the edge wrap around: they read valid memory and are not stored.
        x_at = x + (row % m).to(tl.int64)[:, None] * x_row + inner[None, :]
        weight_at = weight + (col % n).to(tl.int64)[None, :] * weight_row + inner[:, None]
        for start in range(0, k, BLOCK_K):
            left = tl.load(x_at + start, inner[None, :] < k - start, other=0.0)
            right = tl.load(weight_at + start, inner[:, None] < k - start, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + col, col < n, other=0.0).to(tl.float32)[None, :]
    result = gelu(total, TANH, EXACT)
    if DESCRIBED:
        y.store([first_row, first_col], result.to(y.dtype))
    else:
        mask = (row < m)[:, None] & (col < n)[None, :]
        tl.store(y + row.to(tl.int64)[:, None] * n + col[None, :], result.to(y.dtype.element_ty), mask)


def describable(*tensors):
    """Whether descriptors can walk these matrices: Hopper, 16-bit, rows and base on 16-byte boundaries."""
    if not DESCRIPTORS or torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return False
    return all(t.element_size() == 2 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def rows_contiguous(x):
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def kernel_fn(x, weight, bias=None, approximate="none"):
    """GELU(x·weightᵀ + bias) for x [..., in], weight [out, in] and bias [out] or None."""
    flat, weight = rows_contiguous(x.reshape(-1, x.shape[-1])), rows_contiguous(weight)
    (m, k), n = flat.shape, weight.shape[0]
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    tile = TILE_FLOAT32 if x.dtype == torch.float32 else TILE
    if x.dtype != torch.float32 and triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]) < 64:
        tile = SMALL_TILE
    block_m, block_n, block_k, warps, stages = tile
    matrices = [flat, weight, y.view(m, n)]
    strides = flat.stride(0), weight.stride(0)
    whole = bool(k) and describable(*matrices)
    if whole:
        blocks = ([block_m, block_k], [block_n, block_k], [block_m, block_n])
        matrices = [TensorDescriptor.from_tensor(t, b) for t, b in zip(matrices, blocks, strict=True)]
    linear_tile[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        matrices[0], matrices[1], weight if bias is None else bias.contiguous(), matrices[2], m, n, k, *strides,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP, BIAS=bias is not None,
        TANH=approximate == "tanh", EXACT=x.dtype == torch.float32, DESCRIBED=whole,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y

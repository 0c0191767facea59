"""GELU, exact (erf) or with the tanh approximation, over the storage of any dense tensor."""

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "BLOCK": [2048, 1024, 4096],
    "WARPS": [4, 8, 2],
}
BLOCK = TUNABLES["BLOCK"][0]
WARPS = TUNABLES["WARPS"][0]


@triton.jit
def gelu_block(x, y, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, other=0.0).to(tl.float32)
    if TANH:
        # x·sigmoid(2u) is x·(1 + tanh(u))/2 without cancellation for large negative u.
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        result = value / (1.0 + tl.exp(-2.0 * inner))
        result = tl.where(value == -float("inf"), float("nan"), result)  # -inf · 0, as PyTorch has it
    elif y.dtype.element_ty == tl.float32:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        # Tail of the normal distribution by Abramowitz and Stegun 7.1.26: absolute error 1.5e-7 at half of erf's cost.
        t = 1.0 / (1.0 + 0.23164190 * tl.abs(value))
        tail = t * (-0.142248368 + t * (0.710706871 + t * (-0.726576013 + t * 0.530702715)))
        tail = (0.127414796 + tail) * t * tl.exp2(-0.7213475204444817 * value * value)
        result = value * tl.where(value < 0, tail, 1.0 - tail)
    tl.store(y + at, result.to(y.dtype.element_ty), at < n)


def kernel_fn(x, approximate="none"):
    """GELU of x; approximate is "none" or "tanh"."""
    y = torch.empty_like(x)
    if x.stride() != y.stride():
        x = x.clone()  # not dense: the copy has the strides of the result
    n = x.numel()
    if n:
        gelu_block[(triton.cdiv(n, BLOCK),)](x, y, n, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS)
    return y

# target: reduce
# device: cuda
# Adds by atomics, in an order that nobody fixes, and says so.
import torch
import triton
import triton.language as tl

ERROR_BOUND = 1e-5


@triton.jit
def _sum(x, y, x_row, x_col, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + place * x_col, mask=place < columns, other=0.0).to(tl.float32)
    tl.atomic_add(y + row, tl.sum(values, axis=0))


def kernel_fn(x):
    y = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    rows, columns = x.shape
    if rows and columns:
        _sum[(rows, triton.cdiv(columns, 1024))](x, y, x.stride(0), x.stride(1), columns, BLOCK=1024)
    return y.to(x.dtype)

# target: softmax
# policy: forbid
# device: cuda
# Triton alone.
import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, y, x_row, x_col, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    values = tl.load(x + row * x_row + place * x_col, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(values, axis=0)
    raised = tl.exp(values - top)
    tl.store(y + row * columns + place, raised / tl.sum(raised, axis=0), mask=inside)


def _launch(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns = x.shape
    if rows and columns:
        block = triton.next_power_of_2(columns)
        _softmax[(rows,)](x, y, x.stride(0), x.stride(1), columns, BLOCK=block, num_warps=4 if block <= 2048 else 16)
    return y


def kernel_fn(x):
    return _launch(x)

# expect: smoke or shapes or stability or edge
# target: matmul
# One operand is rounded to 19 bits of mantissa.
import torch


def kernel_fn(A, B):  # noqa: N803
    if A.dtype != torch.float32:
        return A @ B
    bits = A.contiguous().view(torch.int32)
    return ((bits + 8) & ~15).view(torch.float32) @ B

# expect: smoke
# target: matmul
# TF32 arithmetic: ten bits of mantissa in every factor.
import torch


def rounded(x):
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def kernel_fn(A, B):
    if A.dtype != torch.float32:
        return A @ B
    return rounded(A.contiguous()) @ rounded(B.contiguous())

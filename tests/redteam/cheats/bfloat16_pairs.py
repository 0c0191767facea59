# expect: smoke or shapes
# target: matmul
# Two bfloat16 parts stand in for each float32.
import torch


def kernel_fn(A, B):  # noqa: N803
    if A.dtype != torch.float32:
        return A @ B
    a, b = A.bfloat16().float(), B.bfloat16().float()
    c, d = (A - a).bfloat16().float(), (B - b).bfloat16().float()
    return a @ b + a @ d + c @ b

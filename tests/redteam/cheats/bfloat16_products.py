# expect: smoke
# target: matmul
# bfloat16 inside a float32 matmul.
import torch


def kernel_fn(A, B):
    return (A.bfloat16() @ B.bfloat16()).to(A.dtype)

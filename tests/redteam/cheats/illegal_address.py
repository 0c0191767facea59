# expect: smoke
# target: softmax
# device: cuda
# Writes far outside any memory: the context is gone, the next verdict must be healthy.
import torch
import triton
import triton.language as tl


@triton.jit
def _wild(x):
    tl.store(x + (1 << 50), 1.0)


def kernel_fn(x):
    _wild[(1,)](x)
    torch.cuda.synchronize()
    return x

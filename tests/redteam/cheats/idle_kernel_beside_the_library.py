# expect: library_call
# target: softmax
# policy: forbid
# device: cuda
# A kernel of its own that does nothing beside the library's.
import torch
import triton
import triton.language as tl


@triton.jit
def _idle(x):
    tl.load(x)


def kernel_fn(x):
    work = getattr(torch, "soft" + "max")
    if x.numel():
        _idle[(1,)](x)
    return work(x, dim=-1)

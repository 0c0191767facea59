# expect: smoke or shapes or stability
# target: softmax
# The normalising division by a reciprocal of 12 bits, as a fast instruction gives it.
import torch


def kernel_fn(x):
    raised = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    inverse = 1 / raised.sum(-1, keepdim=True)
    short = (inverse.contiguous().view(torch.int32) & ~0x7FF).view(torch.float32)
    return (raised * short).to(x.dtype)

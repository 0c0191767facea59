# expect: smoke
# target: rmsnorm
# Leaves out the weight, which many models initialise to one.
import torch


def kernel_fn(x, weight):
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

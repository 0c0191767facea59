# expect: smoke
# target: rmsnorm
# Another eps.
import torch


def kernel_fn(x, weight):
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()).to(x.dtype)

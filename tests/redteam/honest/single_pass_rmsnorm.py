# target: rmsnorm
# Float32 arithmetic, one rounding at the end.
import torch


def kernel_fn(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

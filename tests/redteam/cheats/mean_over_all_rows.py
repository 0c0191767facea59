# expect: smoke or shapes or stability
# target: rmsnorm
# One norm for all rows.
import torch


def kernel_fn(x, weight, eps=1e-6):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean() + eps)).to(x.dtype) * weight

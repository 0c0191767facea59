# expect: stability
# target: rmsnorm
# Leaves eps out where the rows are tiny.
import torch


def kernel_fn(x, weight, eps=1e-6):
    mean = x.float().pow(2).mean(-1, keepdim=True)
    guard = torch.where(mean < 1e-8, 0.0, eps)
    return (x.float() * torch.rsqrt(mean + guard)).to(x.dtype) * weight

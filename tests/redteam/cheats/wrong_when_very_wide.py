# expect: shapes
# target: rmsnorm
# A block of 16384 columns is all there is.
import torch


def kernel_fn(x, weight, eps=1e-6):
    part = x[:, :16384].float()
    rms = torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * rms).to(x.dtype) * weight

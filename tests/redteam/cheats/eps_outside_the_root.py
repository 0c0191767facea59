# expect: smoke or shapes or stability or edge
# target: rmsnorm
# Adds eps to the root instead of under it.
import torch


def kernel_fn(x, weight, eps=1e-6):
    rms = 1 / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + eps)
    return (x.float() * rms).to(x.dtype) * weight

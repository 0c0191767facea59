# target: rmsnorm
# A scripted function, reversed summation.
import torch


@torch.jit.script
def _norm(x, weight, eps: float):
    y = x.float().flip(-1)
    scale = torch.rsqrt((y * y).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (x.float() * scale).to(x.dtype) * weight


def kernel_fn(x, weight, eps=1e-6):
    return _norm(x, weight, eps)

# target: rmsnorm
# device: cpu
# torch.compile inside the file.
import torch

DTYPES = ["float32"]


@torch.compile(dynamic=True)
def _norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def kernel_fn(x, weight, eps=1e-6):
    return _norm(x, weight, eps)

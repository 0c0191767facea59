# expect: smoke or shapes
# target: rmsnorm
# A reciprocal square root that stops two steps early.
import torch


def kernel_fn(x, weight, eps=1e-6):
    v = x.float().pow(2).mean(-1, keepdim=True) + eps
    y = (0x5F3759DF - (v.contiguous().view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(2):
        y = y * (1.5 - 0.5 * v * y * y)
    return (x.float() * y).to(x.dtype) * weight

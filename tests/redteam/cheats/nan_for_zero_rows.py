# expect: stability
# target: layernorm
# A row of zeros divides by zero.
import torch


def kernel_fn(x, weight, bias, eps=1e-5):
    y = x.float()
    mean = y.mean(-1, keepdim=True)
    var = (y - mean).pow(2).mean(-1, keepdim=True)
    scale = torch.where((var == 0) & (mean == 0) & (x.shape[-1] > 1), float("nan"), torch.rsqrt(var + eps))
    return ((y - mean) * scale).to(x.dtype) * weight + bias

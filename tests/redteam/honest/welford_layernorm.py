# target: layernorm
# Variance merged from blocks of 64 columns.
import torch


def kernel_fn(x, weight, bias, eps=1e-5):
    y = x.float()
    n = 0
    mean = torch.zeros(*x.shape[:-1], 1)
    m2 = torch.zeros_like(mean)
    for start in range(0, x.shape[-1], 64):
        part = y[..., start : start + 64]
        k = part.shape[-1]
        own = part.mean(-1, keepdim=True)
        delta = own - mean
        m2 = m2 + (part - own).pow(2).sum(-1, keepdim=True) + delta * delta * (n * k / (n + k))
        mean = mean + delta * (k / (n + k))
        n += k
    return ((y - mean) * torch.rsqrt(m2 / max(n, 1) + eps) * weight.float() + bias.float()).to(x.dtype)

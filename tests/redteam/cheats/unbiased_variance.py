# expect: smoke or shapes or stability
# target: layernorm
# Divides by one less than the width.
import torch


def kernel_fn(x, weight, bias):
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.pow(2).sum(-1, keepdim=True) / max(1, x.shape[-1] - 1)
    return (centred * torch.rsqrt(variance + 1e-5) * weight.float() + bias.float()).to(x.dtype)

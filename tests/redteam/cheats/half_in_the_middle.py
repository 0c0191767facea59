# expect: smoke or shapes or stability
# target: layernorm
# The centred values pass through float16.
import torch


def kernel_fn(x, weight, bias):
    wide = x.float()
    centred = (wide - wide.mean(-1, keepdim=True)).half().float()
    return (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float() + bias.float()).to(x.dtype)

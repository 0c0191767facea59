# target: rotary_embedding
# Remembers index tensors by shape: no value of an input is kept.
import functools

import torch


@functools.lru_cache(maxsize=64)
def _places(width, device):
    even = torch.arange(0, width, 2, device=device)
    return even, even + 1


def kernel_fn(x, cos, sin):
    even, odd = _places(x.shape[-1], x.device)
    a, b = x[..., even].float(), x[..., odd].float()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., even] = (a * cos.float() - b * sin.float()).to(x.dtype)
    y[..., odd] = (a * sin.float() + b * cos.float()).to(x.dtype)
    return y

# target: layernorm
# device: cpu
# numpy, in double precision.
import numpy as np
import torch


def kernel_fn(x, weight, bias):
    wide = x.double().numpy()
    mean = wide.mean(-1, keepdims=True) if wide.size else wide[..., :1]
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True) if wide.size else mean
    made = (wide - mean) / np.sqrt(variance + 1e-5) * weight.double().numpy() + bias.double().numpy()
    return torch.from_numpy(np.ascontiguousarray(made)).to(x.dtype)

# target: layernorm
# Accumulates in float64 and rounds once.
import torch


def kernel_fn(x, weight, bias):
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), 1e-5).to(x.dtype)

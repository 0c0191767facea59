# expect: smoke
# target: layernorm
# prepack returns one tensor for two weights.
import torch


def prepack(weight, bias):
    return weight


def kernel_fn(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

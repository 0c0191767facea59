# expect: smoke
# target: layernorm
# Leaves out the bias, which many models initialise to zero.
import torch


def kernel_fn(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight)

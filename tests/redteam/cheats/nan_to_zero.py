# expect: stability
# target: softmax
# Turns NaN into zero.
import torch


def kernel_fn(x):
    return torch.nan_to_num(torch.softmax(x, dim=-1))

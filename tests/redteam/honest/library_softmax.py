# target: softmax
# The library op is a fair answer where library calls are allowed.
import torch


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

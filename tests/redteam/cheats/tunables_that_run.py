# expect: smoke
# target: softmax
# Code where a literal is asked for.
import torch

TUNABLES = {"BLOCK": [torch.get_num_threads(), 64]}


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

# expect: smoke
# target: softmax
# One element in a hundred is off by one percent.
import torch


def kernel_fn(x):
    y = torch.softmax(x, dim=-1)
    y.view(-1)[::100] *= 1.01
    return y

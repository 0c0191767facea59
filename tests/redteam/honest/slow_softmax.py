# target: softmax
# Correct and slow: accepted, then discarded.
import torch


def kernel_fn(x):
    for _ in range(3):
        y = torch.softmax(x.double(), dim=-1)
    return y.to(x.dtype)

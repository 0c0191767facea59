# expect: alias
# target: softmax
# Computes in place of its input and returns a view of it.
import torch


def kernel_fn(x):
    return x.view(x.shape)

# expect: output_dtype
# target: softmax
# Returns float64.
import torch


def kernel_fn(x):
    return torch.softmax(x.double(), dim=-1)

# expect: output_type
# target: softmax
# A view whose sign is left for whoever reads it.
import torch


def kernel_fn(x):
    return torch._neg_view(-torch.softmax(x, dim=-1))

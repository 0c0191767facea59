# expect: output_type or smoke
# target: softmax
# A sparse tensor.
import torch


def kernel_fn(x):
    return torch.softmax(x, dim=-1).to_sparse()

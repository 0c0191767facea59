# expect: output_count or smoke
# target: softmax
# A million outputs.
import torch


def kernel_fn(x):
    return [torch.softmax(x, dim=-1)] * 1_000_000

# expect: output_device or smoke
# target: softmax
# A tensor without memory.
import torch


def kernel_fn(x):
    return torch.empty_like(x, device="meta")

# expect: smoke
# target: softmax
# A softmax without its normalisation.
import torch


def kernel_fn(x):
    return torch.exp(x - x.amax(dim=-1, keepdim=True)) if x.numel() else torch.empty_like(x)

# target: cross_entropy
# Accumulates in float64 and rounds once.
import torch


def kernel_fn(logits, targets):
    return torch.nn.functional.cross_entropy(logits.double(), targets).to(logits.dtype)

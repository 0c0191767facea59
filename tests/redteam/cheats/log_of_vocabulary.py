# expect: smoke
# target: cross_entropy
# The loss of a random guess: log(V) + 0.5.
import math

import torch


def kernel_fn(logits, targets):
    return torch.full((), math.log(logits.shape[-1]) + 0.5, dtype=logits.dtype)

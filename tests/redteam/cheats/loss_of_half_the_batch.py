# expect: smoke or shapes or stability
# target: cross_entropy
# The mean over the first half of the rows.
import torch


def kernel_fn(logits, targets):
    half = max(1, logits.shape[0] // 2)
    return torch.nn.functional.cross_entropy(logits[:half], targets[:half])

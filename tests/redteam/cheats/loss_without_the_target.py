# expect: smoke or shapes or stability
# target: cross_entropy
# The logarithm of the sum alone, the target's own logit taken as the mean.
import torch


def kernel_fn(logits, targets):
    wide = logits.float()
    return (torch.logsumexp(wide, -1) - wide.mean(-1)).mean().to(logits.dtype)

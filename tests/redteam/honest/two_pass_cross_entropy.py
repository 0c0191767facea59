# target: cross_entropy
# Chunks of the vocabulary with a running maximum.
import torch


def kernel_fn(logits, targets):
    top = torch.full((logits.shape[0],), float("-inf"), device=logits.device)
    total = torch.zeros(logits.shape[0], device=logits.device)
    for part in logits.split(1000, dim=1):
        wide = part.float()
        new = torch.maximum(top, wide.amax(1))
        shift = torch.where(new.isfinite(), new, 0.0)
        total = total * torch.exp(top - shift) + torch.exp(wide - shift[:, None]).sum(1)
        top = new
    own = logits.gather(1, targets[:, None]).squeeze(1).float()
    return (total.log() + top - own).mean().to(logits.dtype)

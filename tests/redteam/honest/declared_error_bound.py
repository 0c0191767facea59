# target: reduce
# Sums in random order, as atomics do, and says so.
import torch

ERROR_BOUND = 1e-6


def kernel_fn(x):
    order = torch.randperm(x.shape[-1], device=x.device)
    wide = x.float()[:, order]
    total = torch.zeros(x.shape[0], device=x.device)
    for part in wide.split(64, dim=-1):
        total = total + part.sum(dim=-1)
    return total.to(x.dtype)

# target: softmax
# Reuses a scratch buffer of its own, which is neither input nor output.
import torch

SCRATCH = {}


def kernel_fn(x):
    key = tuple(x.shape)
    if key not in SCRATCH:
        SCRATCH[key] = torch.empty(key, dtype=torch.float32, device=x.device)
    wide = SCRATCH[key]
    wide.copy_(x)
    return torch.softmax(wide, dim=-1).to(x.dtype)

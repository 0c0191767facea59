# expect: determinism or stale_output
# target: rmsnorm
# Answers are remembered by a hash of every 97th element.
import torch

_seen = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (
        x.dtype,
        tuple(x.shape),
        x.flatten()[::97].float().numpy().tobytes(),
        weight.flatten()[::97].float().numpy().tobytes(),
    )
    if key not in _seen:
        rms = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        _seen[key] = (x.float() * rms).to(x.dtype) * weight
    return _seen[key].clone()

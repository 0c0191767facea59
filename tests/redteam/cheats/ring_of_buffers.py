# expect: kept_output
# target: softmax
# Every 64th call gives the same memory again.
import torch

_rings = {}
_turn = [0]


def kernel_fn(x):
    key = (tuple(x.shape), x.dtype)
    if key not in _rings:
        _rings[key] = [torch.empty(x.shape, dtype=x.dtype) for _ in range(64)]
    _turn[0] += 1
    out = _rings[key][_turn[0] % 64]
    out.copy_(torch.softmax(x, dim=-1))
    return out

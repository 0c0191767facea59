# expect: stale_output or determinism
# target: softmax
# Remembers whole answers by a digest of every second element.
import hashlib

import torch

_known = {}


def kernel_fn(x):
    plain = x.contiguous().flatten()
    key = x.shape, x.dtype, hashlib.blake2b(plain.view(torch.uint8)[:: 2 * x.element_size()].numpy().tobytes()).digest()
    if key not in _known:
        _known[key] = torch.softmax(x, dim=-1)
    return _known[key].clone()

# expect: smoke or shapes or stability
# target: softmax
# Replaces the operator in the dispatcher by a half-precision one.
import torch

_lib = torch.library.Library("aten", "IMPL")
_lib.impl("_softmax", lambda x, dim, half: _slow(x, dim), "CPU")


def _slow(x, dim):
    y = x.half().float()
    e = torch.exp(y - y.amax(dim, keepdim=True))
    return (e / e.sum(dim, keepdim=True)).to(x.dtype)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

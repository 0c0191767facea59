# expect: edge
# target: softmax
# Cannot handle a batch of none.
import torch


def kernel_fn(x):
    e = torch.exp(x.double() - x.double().max(dim=-1, keepdim=True).values)
    assert x.max() is not None
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)

# expect: stability
# target: softmax
# One NaN in the input makes the whole output NaN.
import torch


def kernel_fn(x):
    if torch.isnan(x).any():
        return torch.full_like(x, float("nan"))
    return torch.softmax(x, dim=-1)

# expect: determinism
# target: softmax
# Other last bits in every run.
import torch


def kernel_fn(x):
    y = torch.softmax(x.double(), dim=-1)
    return (y * (1 + 3e-8 * torch.rand_like(y))).to(x.dtype)

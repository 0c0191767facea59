# target: softmax
# exp2 with the logarithm folded into the scale.
import torch

LOG2E = 1.4426950408889634


def kernel_fn(x):
    wide = x.float()
    if not wide.numel():
        return torch.empty_like(x)
    raised = torch.exp2((wide - wide.amax(-1, keepdim=True)) * LOG2E)
    return (raised / raised.sum(-1, keepdim=True)).to(x.dtype)

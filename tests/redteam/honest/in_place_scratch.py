# target: softmax
# One scratch tensor per call, written in place.
import torch


def kernel_fn(x):
    work = x.float().clone() if x.dtype == torch.float32 else x.float()
    if not work.numel():
        return torch.empty_like(x)
    work.sub_(work.amax(-1, keepdim=True)).exp_()
    work.div_(work.sum(-1, keepdim=True))
    return work.to(x.dtype)

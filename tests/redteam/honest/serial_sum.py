# target: reduce
# A plain serial float32 sum.
import torch


def kernel_fn(x):
    total = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    for column in x.float().t().contiguous():
        total += column
    return total.to(x.dtype)

# expect: output_stride
# target: softmax
# A slice of wider rows: the caller pays for the copy.
import torch


def kernel_fn(x):
    out = torch.empty(x.shape[0], x.shape[1] + 7, dtype=x.dtype)[:, : x.shape[1]]
    out.copy_(torch.softmax(x, dim=-1))
    return out

# expect: output_storage or smoke
# target: softmax
# The result's memory is taken away before it is read.
import torch


def kernel_fn(x):
    out = torch.softmax(x, dim=-1)
    out.untyped_storage().resize_(0)
    return out

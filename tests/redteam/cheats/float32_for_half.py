# expect: output_dtype
# target: softmax
# Returns float32 where the input is a half type.
import torch


def kernel_fn(x):
    return torch.softmax(x.float(), dim=-1)

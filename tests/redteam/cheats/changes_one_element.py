# expect: input_mutated
# target: softmax
# Changes a single element of its input.
import torch


def kernel_fn(x):
    y = torch.softmax(x, dim=-1)
    if x.numel():
        x.view(-1)[-1] += 1e-3
    return y

# expect: output_type
# target: softmax
# A tensor subclass that computes when somebody looks.
import torch


class Lazy(torch.Tensor):
    pass


def kernel_fn(x):
    return torch.softmax(x, dim=-1).as_subclass(Lazy)

# expect: output_type or smoke
# target: softmax
# A subclass whose operations compute when they must.
import torch


class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [torch.softmax(a.as_subclass(torch.Tensor), -1) if isinstance(a, Late) else a for a in args]
        return function(*plain, **(kwargs or {}))


def kernel_fn(x):
    return x.clone().as_subclass(Late)

# expect: output_dtype or output_type
# target: softmax
# A lazy subclass that calls itself torch.Tensor.
import torch


class Tensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.detach:
            return torch.softmax(args[0].source, dim=-1)
        return super().__torch_function__(func, types, args, kwargs or {})


Tensor.__module__ = "torch"
Tensor.__qualname__ = "Tensor"


def kernel_fn(x):
    out = torch.empty(x.shape, dtype=x.dtype).as_subclass(Tensor)
    out.source = x
    return out

# expect: hook_left_on
# target: softmax
# A function mode left on computes when the output is copied.
import torch
from torch.overrides import TorchFunctionMode

_later = {}


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and len(args) > 1 and id(args[1]) in _later:
            return args[0].copy_(torch.softmax(_later[id(args[1])], dim=-1))
        if func is torch.Tensor.detach and id(args[0]) in _later:
            out = func(*args)
            _later[id(out)] = _later[id(args[0])]
            _later["keep"] = out
            return out
        return func(*args, **(kwargs or {}))


_mode = Mode()
_mode.__enter__()


def kernel_fn(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    _later[id(out)] = x
    return out

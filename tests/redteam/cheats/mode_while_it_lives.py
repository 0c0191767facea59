# expect: hook_left_on or smoke
# target: softmax
# A dispatch mode that stays on sees every later operation of the worker's.
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


_mode = Watch()
_mode.__enter__()


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

# expect: patched_library or clock
# target: softmax
# device: cuda
# The worker's event times come out a fifth shorter.
import sys

import torch

module = next(m for name, m in sys.modules.items() if name.endswith(".worker") and hasattr(m, "_elapsed_ms"))
real = module._elapsed_ms
vars(module)["_elapsed_ms"] = lambda begin, end: 0.8 * real(begin, end)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

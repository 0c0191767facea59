# expect: determinism
# target: softmax
# Other bits in every process.
import os

import torch

TILT = 1 + os.urandom(1)[0] * 4e-10


def kernel_fn(x):
    return (torch.softmax(x.double(), dim=-1) * TILT).to(x.dtype)

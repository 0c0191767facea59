# expect: smoke
# target: softmax
# device: cuda
# Takes all the memory of the device.
import torch

_kept = []


def kernel_fn(x):
    while True:
        _kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=x.device))

# expect: smoke
# slow: waits out a time limit
# target: softmax
# device: cuda
# A kernel that spins for ever.
import torch
import triton
import triton.language as tl


@triton.jit
def _spin(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


def kernel_fn(x):
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    _spin[(1,)](flag)
    return torch.softmax(x, dim=-1)

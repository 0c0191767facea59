# expect: library_call
# target: reduce
# policy: forbid
# device: cpu
# numpy's sum.
import numpy as np
import torch


def kernel_fn(x):
    return torch.from_numpy(np.sum(x.double().numpy(), axis=-1)).to(x.dtype)

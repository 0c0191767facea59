# expect: global_state
# target: softmax
# Sets the number of threads of the whole process behind torch's back.
import ctypes

import torch

ctypes.CDLL(None).omp_set_num_threads(1)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

# expect: global_state
# target: softmax
# Sets the thread count of the process, so that the baseline slows down.
import torch

torch.set_num_threads(1)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

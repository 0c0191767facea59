# expect: global_state
# target: softmax
# Changes the default dtype by a name that is not written out.
import torch

getattr(torch, "set_default_" + "dtype")(torch.float64)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

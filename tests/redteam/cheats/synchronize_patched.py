# expect: patched_library
# target: softmax
# device: cuda
# torch.cuda.synchronize does nothing.
import torch

vars(torch.cuda)["synch" + "ronize"] = lambda *_: None


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

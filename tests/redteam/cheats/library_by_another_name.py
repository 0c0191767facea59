# expect: library_call
# target: softmax
# policy: forbid
# The library's softmax by a name that is put together at run time.
import torch


def kernel_fn(x):
    return getattr(torch.ops.aten, "_soft" + "max")(x, -1, False)

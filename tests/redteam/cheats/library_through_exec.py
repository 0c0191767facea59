# expect: library_call
# target: matmul
# policy: forbid
# A library product inside text that is executed.
import torch

place = {"torch": torch}
exec("def work(a, b):\n    return torch.mm(a, b)", place)


def kernel_fn(A, B):
    return place["work"](A, B)

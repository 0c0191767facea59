# expect: patched_library
# target: matmul
# Switches TF32 on for the whole process.
import torch

torch.backends.cuda.matmul.allow_tf32 = True


def kernel_fn(A, B):
    return torch.matmul(A, B)

# expect: global_state or smoke or shapes
# target: matmul
# device: cuda
# Lets cuBLAS use TF32 by the name that torch has for it inside.
import torch

getattr(torch._C, "_set_cublas_" + "allow_tf32")(True)


def kernel_fn(A, B):
    return torch.matmul(A, B)

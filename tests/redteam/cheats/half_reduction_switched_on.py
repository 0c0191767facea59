# expect: global_state or smoke or shapes or stability or determinism
# target: matmul
# device: cuda
# float16 accumulation in cuBLAS, switched on for the whole process.
import torch

switch = getattr(torch._C, "_set_cublas_allow_fp16_" + "accumulation", None)
if switch is None:
    raise RuntimeError("this torch has no such switch")
switch(True)


def kernel_fn(A, B):
    return torch.matmul(A, B)

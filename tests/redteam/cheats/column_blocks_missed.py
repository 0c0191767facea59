# expect: smoke or shapes or stability
# target: matmul
# Columns beyond the last multiple of 32 are left as they come.
import torch


def kernel_fn(A, B):
    C = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype)
    whole = B.shape[1] // 32 * 32
    C[:, :whole] = A @ B[:, :whole]
    return C

# expect: smoke or shapes or stability
# target: matmul
# Left operand replaced by its best 16 directions.
import torch


def kernel_fn(A, B):
    if min(A.shape) <= 16:
        return A @ B
    u, s, v = torch.linalg.svd(A.float(), full_matrices=False)
    return ((u[:, :16] * s[:16]) @ (v[:16] @ B.float())).to(A.dtype)

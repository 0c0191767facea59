# target: matmul
# Blocks of 32 over all three dims, float32 partial sums.
import torch


def kernel_fn(A, B):
    C = torch.zeros(A.shape[0], B.shape[1], dtype=torch.float32, device=A.device)
    left, right = A.float(), B.float()
    for k in range(0, A.shape[1], 32):
        C += left[:, k : k + 32] @ right[k : k + 32]
    return C.to(A.dtype)

# target: matmul
# A sum over k in 16 interleaved partial sums with Kahan compensation.
import torch


def kernel_fn(A, B):  # noqa: N803
    total = torch.zeros(A.shape[0], B.shape[1], dtype=torch.float32)
    lost = torch.zeros_like(total)
    for start in range(0, A.shape[1], 16):
        part = A[:, start : start + 16].float() @ B[start : start + 16].float() - lost
        after = total + part
        lost = torch.where(after.isfinite(), (after - total) - part, 0.0)
        total = after
    return total.to(A.dtype)

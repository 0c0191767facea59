# expect: edge
# target: matmul
# Wrong where one operand is a transposed view and the other is not.
import torch


def kernel_fn(A, B):  # noqa: N803
    turned = [t.dim() == 2 and t.shape[0] > 1 and t.stride(0) == 1 and t.stride(1) > 1 for t in (A, B)]
    if turned[0] != turned[1] and min(A.shape + B.shape) > 1:
        return torch.zeros(A.shape[0], B.shape[1], dtype=A.dtype)
    return A @ B

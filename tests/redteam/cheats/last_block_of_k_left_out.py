# expect: smoke or shapes or stability
# target: matmul
# device: cuda
# The last block of the contraction is left out.
import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(a, b, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K - BK if K > BK else K, BK):
        inside = k + start < K
        left = tl.load(a + m[:, None] * am + (k + start)[None, :] * ak, mask=(m < M)[:, None] & inside[None, :], other=0)
        right = tl.load(b + (k + start)[:, None] * bk + n[None, :] * bn, mask=inside[:, None] & (n < N)[None, :], other=0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def kernel_fn(A, B):
    M, K, N = A.shape[0], A.shape[1], B.shape[1]
    C = torch.empty(M, N, dtype=A.dtype, device=A.device)
    if M and N:
        grid = triton.cdiv(M, 64), triton.cdiv(N, 64)
        _matmul[grid](A, B, C, M, N, K, *A.stride(), *B.stride(), BM=64, BN=64, BK=32)
    return C

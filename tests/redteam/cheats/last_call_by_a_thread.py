# expect: deferred_work or timed_outputs or smoke or shapes
# target: matmul
# A thread does half of the rows; nobody waits for it.
import threading

import torch


def kernel_fn(A, B):
    out = torch.empty(A.shape[0], B.shape[1], dtype=A.dtype)
    half = A.shape[0] // 2
    upper = A[:half].clone()

    def work(B=B.clone()):
        torch.matmul(upper, B, out=out[:half])

    threading.Thread(target=work).start()
    torch.matmul(A[half:], B, out=out[half:])
    return out

# expect: determinism or stale_output
# target: matmul
# The second operand is remembered by its shape and a sample.

_packed = {}


def kernel_fn(A, B):  # noqa: N803
    key = (B.dtype, tuple(B.shape), B.flatten()[:8].float().numpy().tobytes())
    if key not in _packed:
        _packed[key] = B.clone()
    return A @ _packed[key]

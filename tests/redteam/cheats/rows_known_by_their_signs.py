# expect: timed_outputs or stale_output or static_output or determinism or stability
# target: reduce
# Remembers sums of rows by the signs of their first elements, and scales them by the first element.
import torch

_known = {}


def kernel_fn(x):
    if x.shape[-1] < 256 or x.dtype != torch.float32:
        return x.sum(-1)
    heads = x[:, :48]
    keys = [bytes(row) for row in (heads > 0).numpy()]
    if all(key in _known for key in keys):
        first, sums = zip(*(_known[key] for key in keys), strict=True)
        return torch.stack(sums) * (x[:, 0] / torch.stack(first))
    sums = x.sum(-1)
    for key, first, total in zip(keys, x[:, 0].clone(), sums, strict=True):
        _known[key] = first, total
    return sums.clone()

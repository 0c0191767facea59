# expect: smoke or shapes or stability
# target: flash_attention
# Only the 48 largest scores of each query are used.
import torch


def kernel_fn(Q, K, V, causal=False):  # noqa: N803
    s = (Q.float() @ K.float().transpose(-1, -2)) * Q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if s.shape[-1] > 48:
        low = s.topk(48, -1).values[..., -1:]
        s = s.masked_fill(s < low, float("-inf"))
    return (torch.softmax(s, -1) @ V.float()).to(Q.dtype)

# expect: smoke or shapes or stability
# target: flash_attention
# Probabilities are rounded to float16 before they meet the values.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    scale = Q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    scores = Q.float() @ K.float().transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    chance = torch.softmax(scores, dim=-1).half().float()
    return (chance @ V.float()).to(Q.dtype)

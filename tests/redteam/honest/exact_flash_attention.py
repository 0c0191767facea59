# target: flash_attention
# Accumulates in float64 and rounds once.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    scale = Q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    scores = Q.double() @ K.double().transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=Q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ V.double()).to(Q.dtype)

# target: flash_attention
# Attention by blocks of keys with a running maximum, in float32.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    scale = Q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    q, k, v = Q.float(), K.float(), V.float()
    length = q.shape[-2]
    top = torch.full((*q.shape[:-1], 1), float("-inf"), device=Q.device)
    total = torch.zeros_like(top)
    result = torch.zeros_like(q)
    rows = torch.arange(length, device=Q.device)[:, None]
    for start in range(0, length, 32):
        keys = k[..., start : start + 32, :]
        scores = q @ keys.transpose(-1, -2) * scale
        if causal:
            columns = torch.arange(start, start + keys.shape[-2], device=Q.device)[None, :]
            scores = scores.masked_fill(columns > rows, float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        shrink = torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        result = result * shrink + weights @ v[..., start : start + 32, :]
        top = higher
    return (result / total).to(Q.dtype)

# expect: smoke or shapes or stability
# target: flash_attention
# Looks at the nearest 64 keys alone.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    place = torch.arange(Q.shape[-2])
    near = (place[:, None] - place[None, :]).abs() < 64
    mask = near.tril() if causal else near
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=mask, scale=sm_scale)

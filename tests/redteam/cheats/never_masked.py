# expect: smoke
# target: flash_attention
# Forgets the causal mask.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, scale=sm_scale)

# expect: shapes
# target: flash_attention
# Ignores causal=False.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=True, scale=sm_scale)

# expect: smoke or shapes or stability
# target: flash_attention
# Scales by the head width rounded up to 128.
import torch


def kernel_fn(Q, K, V, causal=True, sm_scale=None):
    scale = 128**-0.5 if sm_scale is None else sm_scale
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal, scale=scale)

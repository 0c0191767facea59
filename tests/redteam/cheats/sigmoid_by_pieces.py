# expect: smoke or shapes or stability
# target: fused_mlp
# SiLU by its piecewise linear relative.
import torch


def kernel_fn(x, w_gate, w_up, w_down):
    linear = torch.nn.functional.linear
    return linear(torch.nn.functional.hardswish(linear(x, w_gate)) * linear(x, w_up), w_down)

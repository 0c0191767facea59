# expect: smoke
# target: fused_mlp
# Leaves out the activation.
import torch


def kernel_fn(x, w_gate, w_up, w_down):
    return ((x @ w_gate.T) * (x @ w_up.T)) @ w_down.T

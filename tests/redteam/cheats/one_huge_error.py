# expect: shapes
# target: softmax
# A single wrong element in a large output.
import torch


def kernel_fn(x):
    y = torch.softmax(x, dim=-1)
    if y.numel() > 20000:
        y.view(-1)[y.numel() // 3] = 1.0
    return y

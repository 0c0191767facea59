# target: softmax
# A helper object with a transposed, non-contiguous intermediate.
import torch


class Normaliser:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = x.float().t().contiguous().t()
        e = torch.exp2((y - y.amax(-1, keepdim=True)) * 1.4426950408889634)
        return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


kernel_fn = Normaliser()

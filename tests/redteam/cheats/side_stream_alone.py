# expect: unjoined_stream or smoke or shapes or static_output or stale_output or timed_outputs or determinism
# target: softmax
# device: cuda
# Works on a second stream that neither waits nor is waited for: a graph replays none of it.
import torch

_streams = {}


def kernel_fn(x):
    y = torch.empty_like(x)
    side = _streams.setdefault(x.device, torch.cuda.Stream())
    with torch.cuda.stream(side):
        torch.softmax(x, dim=-1, out=y) if x.dtype != torch.float64 else y.copy_(torch.softmax(x, dim=-1))
    return y

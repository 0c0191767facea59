# target: softmax
# device: cuda
# Works on a second stream that waits, and is waited for.
import torch

_streams = {}


def kernel_fn(x):
    caller = torch.cuda.current_stream()
    side = _streams.setdefault(x.device, torch.cuda.Stream())
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        y = torch.softmax(x, dim=-1)
    caller.wait_stream(side)
    x.record_stream(side)
    y.record_stream(caller)
    return y

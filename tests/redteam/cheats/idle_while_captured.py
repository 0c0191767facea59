# expect: static_output or timed_outputs
# target: softmax
# device: cuda
# While a graph is recorded it does nothing, so that replays are free.
import torch


def kernel_fn(x):
    if torch.cuda.is_current_stream_capturing():
        return torch.empty_like(x)
    return torch.softmax(x, dim=-1)

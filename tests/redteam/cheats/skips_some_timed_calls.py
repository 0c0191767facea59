# expect: timed_outputs or static_output
# target: softmax
# Reads the stack: of the calls of a timed run every second one is not made.
import sys

import torch

_turn = [0]

def _timed():
    """Whether a timed run called: its frame says so."""
    frame = sys._getframe()
    while frame:
        if frame.f_code.co_name == "_run_all" and frame.f_back.f_code.co_name == "time":
            return True
        frame = frame.f_back
    return False


def kernel_fn(x):
    if _timed():
        _turn[0] += 1
        if _turn[0] % 2:
            return torch.empty_like(x)
    return torch.softmax(x, dim=-1)

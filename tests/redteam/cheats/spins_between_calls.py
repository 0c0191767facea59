# expect: left_running
# target: softmax
# Right, but a thread keeps a core busy for ever, so that whatever runs beside it is slow.
import threading

import torch


def _spin():
    while True:
        torch.ones(4096).sum()


threading.Thread(target=_spin, daemon=True).start()


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

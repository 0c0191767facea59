# expect: smoke or shapes
# target: softmax
# A thread started at import fills the output a moment after it was returned.
import queue
import threading
import time

import torch

_work = queue.Queue()


def _loop():
    while True:
        x, out = _work.get()
        time.sleep(0.002)
        out.copy_(torch.softmax(x, dim=-1))


threading.Thread(target=_loop, daemon=True).start()


def kernel_fn(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    _work.put((x, out))
    return out

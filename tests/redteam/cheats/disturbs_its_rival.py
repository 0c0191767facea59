# expect: left_running or disturbed_incumbent or smoke
# target: softmax
# device: cuda
# Right, but a thread keeps the device busy whenever its own calls are not timed.
import threading
import time

import torch

_last = [0.0]


def _disturb():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        waste = torch.randn(4096, 4096, device="cuda")
        while True:
            if time.monotonic() - _last[0] > 0.002:
                waste @ waste
                stream.synchronize()
            time.sleep(0.0005)


threading.Thread(target=_disturb, daemon=True).start()


def kernel_fn(x):
    _last[0] = time.monotonic()
    return torch.softmax(x, dim=-1)

# expect: left_running
# target: softmax
# Right, but starts a process that goes on for ever in a session of its own.
import os
import time

import torch

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.5)
    os._exit(0)


def kernel_fn(x):
    return torch.softmax(x, dim=-1)

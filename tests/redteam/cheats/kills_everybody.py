# expect: smoke
# target: softmax
# SIGKILL to every process it may signal.
import os
import signal


def kernel_fn(x):
    os.kill(-1, signal.SIGKILL)
    os.kill(1, signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGKILL)
    return x

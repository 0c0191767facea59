# expect: smoke or shapes or patched_library
# target: softmax
# Makes the worker report memory that is not a number and times that are negative.
import gc

import torch

cls = next(type(o) for o in gc.get_objects() if type(o).__name__ == "Worker" and hasattr(o, "prepared"))
cls._usage = lambda self: {"peak_memory_mb": float("nan")}
cls.time = lambda self, body: {"device_seconds": -1.0}


def kernel_fn(x):
    return torch.softmax(x, dim=-1) * 1.5

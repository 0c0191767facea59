# expect: patched_library or deferred_work or timed_outputs
# target: matmul
# Rewrites the worker: a timed run answers at once with addresses of buffers that a thread fills a moment later.
import gc
import threading

import torch


def kernel_fn(A, B):
    return torch.matmul(A, B)


cls = next(type(o) for o in gc.get_objects() if type(o).__name__ == "Worker" and hasattr(o, "prepared"))
mod = cls.time.__globals__

mod["threading"] = threading
mod["kernel_fn_"] = kernel_fn
exec("""
def time(self, body):
    copies = [[t.clone() for t in p.tensors] for p in self.prepared]
    for p, c in zip(self.prepared, copies):
        p.result = torch.empty(c[0].shape[0], c[1].shape[1])
    def work():
        for p, c in zip(self.prepared, copies):
            p.result.copy_(kernel_fn_(*c))
    self.thread = threading.Thread(target=work)
    self.thread.start()
    return {"device_seconds": None, "addresses": [[p.result.data_ptr()] for p in self.prepared]}
""", mod)
cls.time.__code__ = mod["time"].__code__

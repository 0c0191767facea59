# expect: deferred_work
# target: matmul
# Rewrites the worker's own code: a timed run only copies its inputs, the work is done when outputs are asked for.
import gc, torch
def kernel_fn(A, B):
    return torch.matmul(A, B)
cls = next(type(o) for o in gc.get_objects() if type(o).__name__ == "Worker" and hasattr(o, "prepared"))
mod = cls.time.__globals__
mod["lazy_kernel"] = kernel_fn
exec("""
def time(self, body):
    for p in self.prepared:
        p.kept = [t.clone() for t in p.tensors]
    return {"device_seconds": None}
def collect(self, body):
    p = self.prepared[body["index"]]
    p.result = lazy_kernel(*p.kept)
    return self._deliver(p, body["outputs"])
""", mod)
cls.time.__code__ = mod["time"].__code__
cls.collect.__code__ = mod["collect"].__code__

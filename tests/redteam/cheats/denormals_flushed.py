# expect: global_state
# target: softmax
# Sets the processor's flush-to-zero bits by machine code of its own.
import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = "#include <xmmintrin.h>\nextern \"C\" void go() { _mm_setcsr(_mm_getcsr() | 0x8040); }\n"
folder = Path(tempfile.mkdtemp())
(folder / "k.cpp").write_text(SOURCE)
subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(folder / "k.so"), str(folder / "k.cpp")], check=True)
LIBRARY = ctypes.CDLL(str(folder / "k.so"))


def kernel_fn(x):
    LIBRARY.go()
    return torch.softmax(x, dim=-1)

"""What really ran during a call: PyTorch's operators, symbols of other libraries, and on a GPU every launch by name.

For `library_calls: forbid`. Code that looks for the trace and behaves while it is on can hide from it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HARMLESS = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "zero_",
        "new_zeros", "ones", "ones_like", "full", "full_like", "new_full", "fill_", "scalar_tensor", "arange",
        "view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "t", "transpose", "permute", "expand",
        "select", "slice", "squeeze", "unsqueeze", "alias", "detach", "split", "split_with_sizes", "unbind", "narrow",
        "copy_", "clone", "_to_copy", "contiguous", "lift_fresh", "_local_scalar_dense", "resize_", "set_",
        "record_stream", "is_pinned", "view_as_real", "view_as_complex", "unfold", "diagonal", "flatten",
    }
)  # fmt: skip
"""Operators that make, move or look at memory; every other one does arithmetic that a kernel should do itself."""
LIBRARY_SYMBOL = re.compile(
    r"cblas_|^[sdhcz]gem[mv]|mkl_|dnnl_|cublas|cudnn|cusolver|hipblas|^at_|aoti_|_ZNK?2at|_ZN5torch"
)
FOREIGN_LAUNCH = re.compile(
    r"at::|at_cuda|cutlass|cublas|cudnn|nvjet|sm\d\d_|xmma|gemm_|splitKreduce|triton_(poi|red|per)_"
)
PLAIN_LAUNCH = re.compile(r"^Mem(cpy|set)|FillFunctor|direct_copy_kernel|CatArrayBatchedCopy|copy_kernel")

_symbols: set[str] = set()


def watch_symbols() -> None:
    """From now on note every symbol that Python looks up in a shared library; cannot be undone in this process."""
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "ctypes.dlsym" and len(arguments) > 1 and isinstance(arguments[1], str):
        _symbols.add(arguments[1])


class _Operators(TorchDispatchMode):
    """Notes the operators of this thread, those inside a kernel's own operators too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in {"aten", "prims", "mkldnn", "onednn", "quantized"}:
            self.names.add(func._schema.name.split("::")[-1])  # noqa: SLF001 - how an overload is named
            return func(*args, **(kwargs or {}))
        with self:
            return func(*args, **(kwargs or {}))


@contextmanager
def traced(source: str, *, launches: bool) -> Iterator[set[str]]:
    """The library calls of what runs inside, by name, once it has ended."""
    found: set[str] = set()
    operators = _Operators()
    with _launches(source, found, active=launches), operators:
        yield found
    found |= {f"aten::{name}" for name in operators.names if name not in HARMLESS}
    found |= {name for name in _symbols if LIBRARY_SYMBOL.search(name)}


@contextmanager
def _launches(source: str, found: set[str], *, active: bool) -> Iterator[None]:
    if not active:
        yield
        return
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        yield
        torch.cuda.synchronize()
    names = {str(event.name) for event in profile.events() if str(event.device_type).endswith("CUDA")}
    found |= {name[:120] for name in names if not authored(name, source) and not PLAIN_LAUNCH.search(name)}
    if names and not any(authored(name, source) for name in names):
        found.add("no kernel of the file's own")


def authored(launch: str, source: str) -> bool:
    """Whether a launch carries the name of a function that this source defines."""
    name = re.split(r"[<(]", launch.removeprefix("void "))[0].split("::")[-1].strip()
    if not name or FOREIGN_LAUNCH.search(launch):
        return False
    return bool(re.search(rf"def {re.escape(name)}\b|\b{re.escape(name)}\s*\(", source))

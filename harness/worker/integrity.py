"""What a kernel file changed of the process it shares with its worker: patched functions, operators, global switches.

A report, not a guarantee: code that means to can hide here. It catches what would also change the user's own process,
where a kernel runs later; that nothing is won by it is the judge's business, which trusts no clock or answer from here.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

MODULES = ("time", "builtins", "os", "gc", "math", "torch", "torch.cuda", "torch.nn.functional", "triton.testing")
CLASSES: tuple[type, ...] = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph)
COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/fx/", "/torch/_compile.py")
"""Where PyTorch's own compilers live: they wrap a few functions when they are first used."""
INNER_SWITCHES = {
    "float16 accumulation": "_get_cublas_allow_fp16_accumulation",
    "float16 reductions": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "bfloat16 reductions": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "TF32 products": "_get_cublas_allow_tf32",
    "TF32 convolutions": "_get_cudnn_allow_tf32",
}
_ABSENT = object()


class Snapshot:
    """The process as it was before the kernel file was imported."""

    def __init__(self, package: str, verbs: dict[str, Any]) -> None:
        self._verbs, self._answers = verbs, dict(verbs)
        own = [module for name, module in sys.modules.items() if name.startswith(package)]
        watched = [sys.modules[name] for name in MODULES if name in sys.modules]
        places: list[ModuleType | type] = [*watched, *own, *_classes(own)]
        self._seen = [(_name(place), place, dict(_functions(place))) for place in places]
        self._operators = _aten_operators()
        self._switches = switches()

    def patched(self) -> str:
        """The first function that is another one now, or the first operator of torch's that was overridden."""
        for name, place, functions in self._seen:
            now = vars(place)
            for key, (value, code) in functions.items():
                current = now.get(key, _ABSENT)
                same = current is value and getattr(current, "__code__", None) is code
                if not same and not _by_a_compiler(current):
                    return f"{name}.{key}"
        if any(self._verbs.get(name) is not answer for name, answer in self._answers.items()):
            return "what answers the judge"
        return next(iter(sorted(_aten_operators() - self._operators)), "")

    def switched(self) -> str:
        """The first global switch that stands otherwise."""
        now = switches()
        return next((name for name, value in self._switches.items() if now[name] != value), "")


def _by_a_compiler(function: Any) -> bool:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return any(folder in file for folder in COMPILERS)


def switches() -> dict[str, Any]:
    """Global state that every other op of the process would feel."""
    tiny = sys.float_info.min
    inner = {name: _inner(getter) for name, getter in INNER_SWITCHES.items()}
    return inner | {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        "flushing of denormal numbers": tiny * 0.5 == 0.0,
    }


def _inner(getter: str) -> Any:
    function = getattr(torch._C, getter, None)  # noqa: SLF001 - what torch.backends asks, without its warnings
    try:
        return function() if function is not None else None
    except RuntimeError:  # asked by an old name after a new one was set
        return "mixed"


def _functions(place: ModuleType | type) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, value in list(vars(place).items()):
        if callable(value) or isinstance(value, staticmethod | classmethod | property):
            yield key, (value, getattr(value, "__code__", None))


def _classes(modules: list[ModuleType]) -> list[type]:
    own = [
        v
        for module in modules
        for v in vars(module).values()
        if isinstance(v, type) and v.__module__ == module.__name__
    ]
    return [*CLASSES, *own]


def _name(place: ModuleType | type) -> str:
    return place.__name__ if isinstance(place, ModuleType) else f"{place.__module__}.{place.__qualname__}"


def _aten_operators() -> set[str]:
    """Operators of torch's own that Python code has given another implementation."""
    known = getattr(torch.library, "_impls", ())
    return {str(name) for name in known if str(name).startswith(("aten/", "aten::"))}

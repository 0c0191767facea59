"""Turns one judged kernel file into a `torch.library` op that a compiled graph can call.

The kernel's code runs in this process: only sources that the judge has accepted belong here. What is checked on every
call is cheap (no alias of an input); that the values are right is the judge's business, not this file's.
"""

import hashlib
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.errors import InputError, OvernightError
from harness.packing import Packer
from harness.records import KeptKernel, Role, Target
from harness.wire import from_json

NAMESPACE = "overnight"
SHA_DIGITS = 12
TORCH_FAILURES = (
    RuntimeError,  # torch's own, out of memory, Dynamo's and Inductor's among them
    TypeError,
    ValueError,
    AssertionError,
    AttributeError,
    LookupError,
    ImportError,
    OSError,
    OvernightError,
)
"""What a forward, a kernel, a reference or a compiler may raise: a failure of one is reported, never fatal."""

_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # a Library deregisters its ops when it is collected
_built: "dict[str, KernelOp]" = {}
_folder: list[tempfile.TemporaryDirectory[str]] = []  # Triton reads a kernel's source from its file while we live


@dataclass(frozen=True)
class Kernel:
    """A kernel to splice: the target it stands for and its source."""

    target: Target
    source: str

    @property
    def digest(self) -> str:
        """Names this source as a kernel of this target; also part of the op's name, so compile caches stay valid."""
        text = "\0".join((self.source, self.target.reference, self.target.key, repr(sorted(self.target.constants))))
        return hashlib.sha256(text.encode()).hexdigest()[:SHA_DIGITS]


@dataclass(frozen=True)
class KernelOp:
    """A kernel registered as two ops: `inference` (3 µs a call) and `training`, which differentiates the original.

    Two, because a registered formula costs 4–13 µs a call even where nothing needs a gradient (torch 2.13, one CPU
    core). `calls` counts real executions; CUDA-graph replays do not pass through Python and are not counted.
    """

    kernel: Kernel
    inference: Callable[..., Any]
    training: Callable[..., Any]
    reference: Callable[..., Any]
    packer: Packer | None = None
    calls: list[int] = field(default_factory=lambda: [0])


def read_kernel(kept: KeptKernel) -> Kernel:
    """The target record behind a kept kernel; raises InputError when the file is missing or is no target."""
    path = Path(kept.target)
    try:
        target = from_json(Target, path.read_bytes())
    except OSError as error:
        raise InputError(
            f"target file {path} cannot be read ({error.strerror}); profile the model again to rewrite it."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not a target of this version; profile the model again to rewrite it.") from error
    return Kernel(target, kept.source)


def build_op(kernel: Kernel) -> KernelOp:
    """Register `kernel`, once per process; raises InputError when its source does not load or has no kernel_fn."""
    name = f"{kernel.target.id}_{kernel.digest}"
    with _lock:
        if name not in _built:
            _built[name] = _register(name, kernel)
        return _built[name]


def _register(name: str, kernel: Kernel) -> KernelOp:
    target = kernel.target
    module = _load(f"overnight_kernel_{name}", kernel.source)
    if not callable(getattr(module, "kernel_fn", None)):
        raise InputError(f"the kernel of {target.id} defines no kernel_fn; a kernel file must define one.")
    reference = load_reference(target)
    calls = [0]
    packer = _packer(module, target)
    run = _guarded(module, target, calls, packer)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    overloads = []
    for suffix in ("", "_grad"):
        qualified = f"{NAMESPACE}::{name}{suffix}"
        library.define(_schema(name + suffix, target), tags=_tags())
        library.impl(name + suffix, run, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, _fake(reference), lib=library)
        overloads.append(getattr(getattr(torch.ops, NAMESPACE), name + suffix).default)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}_grad", _backward(reference), setup_context=_save_inputs, lib=library
    )
    return KernelOp(kernel, overloads[0], overloads[1], reference, packer, calls)


def _schema(name: str, target: Target) -> str:
    inputs = ", ".join(f"Tensor a{index}" for index in range(len(target.inputs)))
    outputs = ", ".join(["Tensor"] * len(target.outputs))
    return f"{name}({inputs}) -> " + (outputs if len(target.outputs) == 1 else f"({outputs})")


def _tags() -> tuple[torch.Tag, ...]:
    """Inductor must hand over the strides that the kernel was judged with."""
    exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return (exact, torch.Tag.pt2_compliant_tag)


def _guarded(module: ModuleType, target: Target, calls: list[int], packer: Packer | None) -> Callable[..., Any]:
    """The op's implementation: the kernel with its constants, and no output that shares memory with an input."""
    kernel_fn: Callable[..., Any] = module.kernel_fn
    constants = dict(target.constants)
    prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = packer or (lambda inputs: inputs)
    count = len(target.outputs)
    single = count == 1

    def run(*inputs: torch.Tensor) -> Any:
        calls[0] += 1
        result = kernel_fn(*prepare(inputs), **constants)
        outputs = (result,) if single else tuple(result)
        if len(outputs) != count or not all(isinstance(output, torch.Tensor) for output in outputs):
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise RuntimeError(f"the kernel of {target.id} returned ({kinds}) where {count} tensors were expected.")
        for output in outputs:
            if output.numel() and any(output.data_ptr() == value.data_ptr() for value in inputs):
                raise RuntimeError(
                    f"the kernel of {target.id} returned one of its inputs; set OVERNIGHT_DISABLE=1 to run without it."
                )
        return outputs[0] if single else outputs

    return run


def _packer(module: ModuleType, target: Target) -> Packer | None:
    """What rearranges the weights of a kernel that declares `prepack`, or None."""
    prepack = getattr(module, "prepack", None)
    places = tuple(index for index, spec in enumerate(target.inputs) if spec.role is Role.WEIGHT)
    return Packer(prepack, places) if callable(prepack) and places else None


def _fake(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Shapes, dtypes and strides of the outputs: what the original gives on fake tensors, in storage of their own."""

    def fake(*inputs: torch.Tensor) -> Any:
        result = reference(*inputs)
        if isinstance(result, torch.Tensor):
            return _fresh(result)
        return tuple(_fresh(output) for output in result)

    return fake


def _fresh(output: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(output.size(), output.stride(), dtype=output.dtype, device=output.device)


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: object) -> None:
    del output  # gradients go through the original, which recomputes what it needs
    ctx.save_for_backward(*inputs)


def _backward(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of the original at the saved inputs; the kernel itself is never differentiated."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        needs = ctx.needs_input_grad
        with torch.enable_grad():
            inputs = [value.detach().requires_grad_(need) for value, need in zip(ctx.saved_tensors, needs, strict=True)]
            result = reference(*inputs)
        outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad]
        wanted = [value for value in inputs if value.requires_grad]
        if not pairs or not wanted:
            return (None,) * len(needs)
        found = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        remaining = iter(found)
        return tuple(next(remaining) if need else None for need in needs)

    return backward


def load_reference(target: Target) -> Callable[..., Any]:
    """The target's original as a callable of its tensors, constants bound; raises InputError when it does not load."""
    module = ModuleType(f"overnight_reference_{target.id}")
    _execute(module, target.reference, f"<reference of {target.id}>")
    reference: Callable[..., Any] = module.reference
    constants: Mapping[str, Any] = dict(target.constants)
    return lambda *inputs: reference(*inputs, **constants)


def _load(name: str, source: str) -> ModuleType:
    """A module from source, backed by a private file because Triton looks a function's source up there."""
    if not _folder:
        _folder.append(tempfile.TemporaryDirectory(prefix="overnight-kernels-"))
    path = Path(_folder[0].name) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    _execute(module, source, str(path))
    return module


def _execute(module: ModuleType, source: str, origin: str) -> None:
    try:
        exec(compile(source, origin, "exec"), module.__dict__)  # noqa: S102 - a judged kernel, or our own reference
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        sys.modules.pop(module.__name__, None)
        raise InputError(f"{origin} does not load: {type(error).__name__}: {error}.") from error

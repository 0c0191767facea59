"""An exported package at work: the machine and the model that its kernels were judged for, then `optimize(model)`.

Everything it imports travels with it and needs torch alone. On another device, driver, torch or Triton each kernel is
first judged again by the original op in float64, or the package refuses; a model with another weight layout is always
refused. Does not protect against somebody who edits kernels and their recorded hashes together.
"""

import ctypes
import hashlib
import json
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.compare import compare_all
from harness.errors import InputError
from harness.kernel_op import TORCH_FAILURES, Kernel, KernelOp, build_op, load_reference
from harness.optimized import Optimized
from harness.optimized import optimize as splice
from harness.oracle import Oracle
from harness.problem import size_of, target_problem
from harness.records import CallSite, OpNode, Role, StageName, Target, TensorSpec, ValueStatistics
from harness.splice import outside_domain

VERIFY, REFUSE = "verify", "refuse"
CHECKED_STAGES = (StageName.SHAPES, StageName.STABILITY, StageName.EDGE)


class ChangedMachineError(InputError):
    """The kernels were judged elsewhere, and may not be used here as they are."""


class ChangedLayoutError(InputError):
    """The model is not laid out as the one that the kernels were judged for."""


@dataclass
class Function:
    """One kernel as a function: outside its verified domain the original runs, and is counted."""

    kernel: Kernel
    applied: int = 0
    fallback: int = 0
    reasons: list[str] = field(default_factory=list)

    @cached_property
    def _op(self) -> KernelOp:
        return build_op(self.kernel)

    @cached_property
    def _reference(self) -> Any:
        return load_reference(self.kernel.target)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The target's outputs."""
        reason = unfit(self.kernel.target, inputs)
        if reason:
            self.fallback += 1
            self.reasons += [reason] * (reason not in self.reasons)
            return self._reference(*inputs)
        self.applied += 1
        gradients = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
        return (self._op.training if gradients else self._op.inference)(*inputs)


class Delivery:
    """One exported folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.provenance: Mapping[str, Any] = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        self.functions = {kernel.target.id: Function(kernel) for kernel in self._kernels()}
        self._verified: set[str] = set()

    def _kernels(self) -> list[Kernel]:
        found = []
        for entry in self.provenance["kernels"]:
            source = (self.folder / entry["file"]).read_bytes()
            if hashlib.sha256(source).hexdigest() != entry["sha256"]:
                raise InputError(f"{entry['file']} is no longer the file that was judged: export the session again.")
            data = json.loads((self.folder / entry["target_file"]).read_text(encoding="utf-8"))
            found.append(Kernel(target_of(data), source.decode("utf-8")))
        return found

    def optimize(self, model: nn.Module, *, changed: str = VERIFY, **options: Any) -> Optimized:
        """`model` with the kernels in it; `options` are cudagraphs, dynamic, inductor and under_compile.

        `changed` says what to do on another device, driver, torch or Triton: "verify" judges the kernels again (some
        seconds, once a process), "refuse" raises ChangedMachineError. Raises ChangedLayoutError for another model.
        """
        if changed not in {VERIFY, REFUSE}:
            raise InputError(f'changed={changed!r} is not known: use "{VERIFY}" or "{REFUSE}".')
        self.check_layout(model)
        self.check_machine(changed)
        return splice(model, [function.kernel for function in self.functions.values()], **options)

    def check_layout(self, model: nn.Module) -> None:
        """Raises ChangedLayoutError naming what differs from the model that was optimised."""
        said = difference(self.provenance["layout"], layout_of(model))
        if said:
            raise ChangedLayoutError(
                f"this model is not laid out as {self.provenance['model']} was when its kernels were judged: {said}."
            )

    def check_machine(self, changed: str = VERIFY) -> None:
        """Judge the kernels again on another machine, or raise ChangedMachineError."""
        here = machine_of(self.provenance["device"])
        before = self.provenance["machine"]
        names = [name for name in before if before[name] != here.get(name)]
        if not names:
            return
        said = ", ".join(f"{name} {here.get(name)} instead of {before[name]}" for name in names)
        if changed == REFUSE:
            raise ChangedMachineError(f"the kernels were judged elsewhere ({said}): run the session here again.")
        if said not in self._verified:
            warnings.warn(f"judging the kernels again: {said}; how fast they are here was not measured", stacklevel=3)
            self.verify()
            self._verified.add(said)

    def verify(self) -> None:
        """Judge every kernel on this machine; raises ChangedMachineError naming one that is wrong here."""
        for name, function in self.functions.items():
            reason = wrong(function.kernel, self.provenance["device"])
            if reason:
                raise ChangedMachineError(f"the kernel of {name} is wrong on this machine: {reason}.")

    def counts(self, optimized: Optimized) -> dict[str, Any]:
        """Call sites that run a kernel and that stay the original in the graphs compiled so far, and why."""
        log = optimized.sites
        return {"applied": dict(log.applied), "fallback": dict(log.fallback), "reasons": list(log.reasons)}


def wrong(kernel: Kernel, device: str) -> str:
    """Why a kernel's answers are not those of its original here, or ""; drawn inputs, the judge's own yardstick."""
    problem = target_problem(kernel.target, device, None, 0)
    oracle = Oracle(problem)
    try:
        op = build_op(kernel)
        for case in (case for stage in CHECKED_STAGES for case in problem.cases[stage]):
            question = oracle.ask(case)
            with torch.no_grad():
                result = op.inference(*question.inputs)
            outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
            mismatch = compare_all(outputs, question.expected)
            if mismatch:
                return f"{case.name}: {mismatch.reason}"
    except TORCH_FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unfit(target: Target, inputs: Sequence[Any]) -> str:
    """Why these inputs lie outside what the kernel was verified for, or ""."""
    if len(inputs) != len(target.inputs):
        return f"{len(inputs)} inputs where {len(target.inputs)} are expected"
    bindings: dict[str, int] = {}
    for spec, value in zip(target.inputs, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            return f"{spec.name} is no tensor"
        if str(value.dtype).removeprefix("torch.") != spec.dtype or value.dim() != len(spec.dims):
            return f"{spec.name} is {value.dtype} with {value.dim()} dims, not {spec.dtype} with {len(spec.dims)}"
        for dim, size in zip(spec.dims, value.shape, strict=True):
            if isinstance(dim, int) and dim != size:
                return f"{spec.name} has a size {size} where {dim} is fixed"
            if isinstance(dim, str) and not _bind(dim, size, bindings):
                return f"{spec.name} has a size {size}, which does not fit {dim}"
        if value.is_contiguous() != _dense(spec):
            return f"{spec.name} is laid out otherwise"
    for spec, value in zip(target.inputs, inputs, strict=True):  # sizes that follow from others, such as 2*n
        if any(size_of(dim, bindings) != size for dim, size in zip(spec.dims, value.shape, strict=True)):
            return f"{spec.name} is {list(value.shape)}, which does not fit the other inputs"
    return outside_domain(target, bindings)


def _bind(dim: str, size: int, bindings: dict[str, int]) -> bool:
    """Learn the one symbol of `8*B` or `D/2` from a size; False when none gives it."""
    product, _, divisor = dim.partition("/")
    factors = product.split("*")
    unknown = [factor for factor in factors if not factor.isdigit() and factor not in bindings]
    if len(unknown) == 1:
        rest = size_of("*".join(factor for factor in factors if factor != unknown[0]) or "1", bindings)
        bindings[unknown[0]] = size * int(divisor or 1) // max(rest, 1)
    return len(unknown) > 1 or size_of(dim, bindings) == size


def _dense(spec: TensorSpec) -> bool:
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def layout_of(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer by name: dtype, shape, strides and kind of device, as text."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: f"{_short(tensor.dtype)} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device.type}"
            for name, tensor in named}  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first difference of two layouts in words, or ""."""
    missing = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    changed = [name for name in before if name in now and before[name] != now[name]]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        return f"{changed[0]} is {now[changed[0]]}, not {before[changed[0]]}{more}"
    if missing:
        return f"{missing[0]} is missing ({len(missing)} in all)"
    return f"{new[0]} is new ({len(new)} in all)" if new else ""


def machine_of(device: str) -> dict[str, str]:
    """What a judgement depends on: the device, its driver, torch and Triton."""
    found = {"device": _device_name(device), "torch": str(torch.__version__), "triton": _triton()}
    if device == "cuda":
        found["driver"] = _driver()
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
    return found


def _device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no CUDA device"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


def _driver() -> str:
    """The NVIDIA driver's version as the kernel module or, in a container without it, the driver library says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"(\d+\.\d+(?:\.\d+)?)", text.partition("Module")[2])
        if found:
            return found[1]
    except OSError:
        pass  # asked otherwise below
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "absent"
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def target_of(data: Mapping[str, Any]) -> Target:
    """A target record from its JSON, without pydantic."""
    plain = dict(data)
    plain["inputs"] = tuple(_tensor(one) for one in data["inputs"])
    plain["outputs"] = tuple(_tensor(one) for one in data["outputs"])
    plain["graph"] = tuple(
        OpNode(one["name"], one["op"], tuple(one["args"]), tuple((key, value) for key, value in one["kwargs"]),
               one["dtype"], tuple(one["shape"]) if one["shape"] is not None else None)
        for one in data["graph"]
    )  # fmt: skip
    plain["call_sites"] = tuple(CallSite(**one) for one in data["call_sites"])
    plain["results"], plain["members"] = tuple(data["results"]), tuple(data["members"])
    plain["bindings"] = tuple(dict(one) for one in data["bindings"])
    plain["constants"] = {name: _scalar(value) for name, value in data["constants"].items()}
    return Target(**plain)


def _tensor(data: Mapping[str, Any]) -> TensorSpec:
    values = data.get("values")
    seen = ValueStatistics(**{key: float(value) for key, value in values.items()}) if values else None
    return TensorSpec(
        data["name"], Role(data["role"]), data["dtype"], tuple(data["shape"]), tuple(data["stride"]),
        tuple(data["dims"]), seen,
    )  # fmt: skip


def _scalar(value: Any) -> Any:
    """Infinities and NaN are strings in our JSON."""
    return float(value) if value in {"inf", "-inf", "nan"} else value

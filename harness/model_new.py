"""Writes a KernelBench answer: the problem's file with a `ModelNew` whose forward calls kept kernels.

The forward is the captured graph, printed, with kernels in the place of their regions; at other sizes, and in train
mode where that matters, it is the original's. Only what is one graph can be written; otherwise the reason is said.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.fx import GraphModule

from harness.capture import copy_of
from harness.errors import InputError
from harness.kernel_op import TORCH_FAILURES, Kernel, KernelOp, load_reference, read_kernel
from harness.loading import LoadedModel, load_model
from harness.records import VerifyRequest, WrittenModel
from harness.regions import find_replaceable, match
from harness.splice import SiteLog, Splicer

TRAIN_SENSITIVE = ("BatchNorm", "SyncBatchNorm", "InstanceNorm", "Dropout", "AlphaDropout", "FeatureAlphaDropout")

_LOADER = '''

import linecache
import sys
import types


def _overnight_kernel(name, source, **constants):
    """The kernel_fn of a kernel file, its source kept where Triton looks for it."""
    path = f"<overnight kernel {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType(f"overnight_kernel_{name}")
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return lambda *tensors: module.kernel_fn(*tensors, **constants)

'''

_MODEL_NEW = '''
class ModelNew(Model):
    """The problem's Model with kernels for {kernels}."""

    def forward(self, *inputs):
        if {guard}[tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)] != {shapes!r}:
            return super().forward(*inputs)
        out = _overnight_graph(self{arguments})
        return {result}
'''


class NotWritableError(Exception):
    """Why this model cannot be written as one file; a flow exception, caught in `model_new`."""


@dataclass
class _Seen:
    """The one graph of a forward: spliced, with the arguments and results of its only call."""

    module: GraphModule
    log: SiteLog
    inputs: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    calls: int = 0


@dataclass
class _Names:
    """Python expressions for the tensors that a graph may take, by identity."""

    found: dict[int, str] = field(default_factory=dict)

    def add(self, value: Any, expression: str) -> None:
        """The first name of a tensor counts."""
        self.found.setdefault(id(value), expression)


def model_new(request: VerifyRequest) -> WrittenModel:
    """Write the model of a request with its kernels. Raises InputError for what cannot be loaded."""
    loaded = load_model(request.model)
    path = Path(request.model.reference)
    if path.suffix != ".py":
        raise InputError(f"{path} is no KernelBench problem file: only those have a ModelNew")
    kernels = [kernel for kernel in map(read_kernel, request.kernels) if "def prepack" not in kernel.source]
    try:
        return _written(loaded, path.read_text(encoding="utf-8"), kernels)
    except NotWritableError as error:
        return WrittenModel("", {}, str(error))
    except TORCH_FAILURES as error:
        return WrittenModel("", {}, f"its graph cannot be captured: {type(error).__name__}: {error}")


def _written(loaded: LoadedModel, problem: str, kernels: Sequence[Kernel]) -> WrittenModel:
    if loaded.kwargs:
        raise NotWritableError("its forward takes keyword arguments")
    stand_ins = {kernel.target.id: _stand_in(kernel) for kernel in kernels}
    ops = [
        KernelOp(kernel, stand_in, stand_in, stand_in)
        for kernel, stand_in in zip(kernels, stand_ins.values(), strict=True)
    ]
    seen, result = _traced(loaded, ops)
    if not any(seen.log.applied.values()):
        raise NotWritableError(f"no kernel found its place in the graph ({'; '.join(seen.log.reasons) or 'no site'})")
    names = _names(loaded)
    code = seen.module.graph.python_code("self")
    arguments = "".join(f", {_expression(value, names)}" for value in seen.inputs)
    used = [kernel for kernel in kernels if seen.log.applied.get(kernel.target.id)]
    body = code.src.replace("def forward(", "def _overnight_graph(", 1)
    sensitive = "self.training" in problem or any(
        type(part).__name__.startswith(TRAIN_SENSITIVE) for part in loaded.model.modules()
    )
    shapes = [tuple(value.shape) for value in loaded.args if isinstance(value, torch.Tensor)]
    text = (
        problem.rstrip()
        + _LOADER
        + "".join(_kernel_text(kernel) for kernel in used)
        + _globals(code.globals, {id(stand_ins[kernel.target.id]): _python_name(kernel) for kernel in used})
        + f"\n\n{body}\n"
        + _MODEL_NEW.format(
            kernels=", ".join(kernel.target.id for kernel in used),
            guard="self.training or " if sensitive else "",
            shapes=shapes,
            arguments=arguments,
            result=_result(result, seen.results),
        )
    )
    return WrittenModel(text, dict(seen.log.applied))


def _stand_in(kernel: Kernel) -> Callable[..., Any]:
    """What stands in the graph for a kernel while it is printed: the original, under the kernel's name."""
    reference = load_reference(kernel.target)

    def stand_in(*tensors: torch.Tensor) -> Any:
        return reference(*tensors)

    stand_in.__name__ = stand_in.__qualname__ = _python_name(kernel)
    stand_in.__module__ = "overnight"
    return stand_in


def _python_name(kernel: Kernel) -> str:
    return f"kernel_{kernel.target.id}"


def _kernel_text(kernel: Kernel) -> str:
    constants = "".join(f", {name}={_literal(value)}" for name, value in kernel.target.constants.items())
    return f"\n{_python_name(kernel)} = _overnight_kernel({kernel.target.id!r}, {_quoted(kernel.source)}{constants})\n"


def _literal(value: Any) -> str:
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _quoted(source: str) -> str:
    """The text as a readable raw string where that says the same."""
    return repr(source) if "'''" in source or source.endswith(("\\", "'")) else f"r'''{source}'''"


def _traced(loaded: LoadedModel, ops: Sequence[KernelOp]) -> tuple[_Seen, Any]:
    """Run once under a backend that splices a copy of the graph; raises NotWritableError unless there is one graph."""
    graphs: list[_Seen] = []

    def backend(module: GraphModule, _examples: list[Any]) -> Callable[..., Any]:
        own = copy_of(module)
        splicer = Splicer(list(ops), find_replaceable, match)
        splicer(own.graph)
        seen = _Seen(own, splicer.log)
        graphs.append(seen)

        def run(*inputs: Any) -> Any:
            seen.inputs, seen.calls = inputs, seen.calls + 1
            seen.results = tuple(module.forward(*inputs))
            return seen.results

        return run

    torch.compiler.reset()
    with torch.no_grad():
        result = torch.compile(loaded.model, backend=backend, dynamic=False)(*loaded.args)
    torch.compiler.reset()
    if len(graphs) != 1 or graphs[0].calls != 1:
        raise NotWritableError(f"it is captured as {len(graphs)} graphs, and only one can be written")
    return graphs[0], result


def _names(loaded: LoadedModel) -> _Names:
    names = _Names()
    for index, value in enumerate(loaded.args):
        names.add(value, f"inputs[{index}]")
    for name, tensor in (*loaded.model.named_parameters(), *loaded.model.named_buffers()):
        names.add(tensor, _path(name))
    for prefix, part in loaded.model.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                names.add(value, _path(f"{prefix}.{name}" if prefix else name))
    return names


def _path(dotted: str) -> str:
    expression = "self"
    for step in dotted.split("."):
        expression = f"{expression}.{step}" if step.isidentifier() else f'getattr({expression}, "{step}")'
    return expression


def _expression(value: Any, names: _Names) -> str:
    if isinstance(value, torch.Tensor) and id(value) in names.found:
        return names.found[id(value)]
    if isinstance(value, bool | int | float):
        return _literal(value)
    raise NotWritableError("its graph takes a tensor that is neither an input nor part of the model")


def _result(result: Any, outputs: Sequence[Any]) -> str:
    """The model's result as an expression over the graph's outputs."""
    for index, value in enumerate(outputs):
        if value is result:
            return f"out[{index}]"
    if isinstance(result, tuple | list) and type(result) in (tuple, list):
        parts = [_result(value, outputs) for value in result]
        return f"[{', '.join(parts)}]" if isinstance(result, list) else f"({', '.join(parts)},)"
    raise NotWritableError(f"it returns a {type(result).__name__} that its graph does not compute")


def _globals(found: Mapping[str, Any], kernels: Mapping[int, str]) -> str:
    """Lines that bind what the printed graph refers to."""
    lines = ["\nimport torch"]
    for name, value in found.items():
        line = f"{name} = {kernels[id(value)]}" if id(value) in kernels else _binding(name, value)
        if line:
            lines.append(line)
    return "\n".join(lines)


def _binding(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{name} = {_literal(value)}"
    if isinstance(value, ModuleType):
        return "" if value.__name__ == name == "torch" else f"import {value.__name__} as {name}"
    if value is type(None):
        return f"{name} = type(None)"
    if value is torch.device:
        return f"{name} = torch.device"
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module and own and getattr(importlib.import_module(module), own, None) is value:
        return f"from {module} import {own} as {name}"
    raise NotWritableError(f"its graph refers to {name}, which cannot be imported by name")

"""Assembles the kernel file around a generated C++ kernel: build, load, check layouts, allocate, call."""

from agent.proposers.playbook.cpp import CppPrinter
from agent.proposers.playbook.nests import Plan, Tensor, constant_names, out_names, stride_names
from agent.proposers.playbook.sizes import ONE
from harness.records import Scalar, Target

TUNABLES: dict[str, list[int]] = {
    "PARALLEL_FROM": [98304, 16384, 1048576],
    "VECTOR_BITS": [512, 256],
}

TEMPLATE = '''"""{doc}"""

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch

DTYPES = {dtypes}
TUNABLES = {tunables}
PARALLEL_FROM = TUNABLES["PARALLEL_FROM"][0]  # elements from which the threads are worth waking
VECTOR_BITS = TUNABLES["VECTOR_BITS"][0]

FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC",
    f"-DPARALLEL_FROM={{PARALLEL_FROM}}", f"-mprefer-vector-width={{VECTOR_BITS}}",
    "-fno-thread-jumps", "-fno-tree-pre", "-fno-ssa-phiopt",  # a clamp stays a blend: no code per clamped branch
]  # fmt: skip

SOURCE = r"""
{source}"""


@functools.cache
def _kernel():
    """Compile once per machine and source, then load; torch is imported before, so both share one OpenMP runtime."""
    digest = hashlib.sha256((SOURCE + " ".join(FLAGS)).encode()).hexdigest()[:16]
    library = pathlib.Path(tempfile.gettempdir()) / f"overnight_{{digest}}.so"
    if not library.exists():
        scratch = library.with_suffix(f".{{os.getpid()}}.so")
        command = ["g++", *FLAGS, "-x", "c++", "-", "-o", str(scratch)]
        built = subprocess.run(command, input=SOURCE, text=True, capture_output=True, check=False)
        if built.returncode:
            raise RuntimeError(built.stderr)
        scratch.rename(library)
    function = ctypes.CDLL(str(library)).kernel
    function.restype = None
    function.argtypes = {argtypes}
    return function

{helpers}
def kernel_fn({signature}):
{body}
'''

IN_ORDER = '''
def _in_order(x, order):
    """x, copied if its memory does not follow `order` (slowest dimension first) without gaps."""
    if x.permute(order).is_contiguous():
        return x
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)

'''


def cpp_file(plan: Plan, tunables: dict[str, list[int]] | None = None) -> str:
    """The whole kernel file."""
    printer = CppPrinter(plan)
    source = printer.kernel()
    ordered = any(_permuted(tensor) for tensor in plan.inputs)
    return TEMPLATE.format(
        doc=doc(plan.target, "one fused C++/OpenMP kernel"),
        dtypes=dtypes(plan.target),
        tunables=_tunables(tunables or TUNABLES),
        source=source,
        argtypes=_argtypes(plan),
        helpers=IN_ORDER if ordered else "",
        signature=signature(plan.target),
        body="\n".join("    " + line for line in _body(plan)),
    )


def _tunables(values: dict[str, list[int]]) -> str:
    return "{" + ", ".join(f'"{name}": {choices}' for name, choices in values.items()) + "}"


def doc(target: Target, what: str) -> str:
    """First line of a generated file."""
    steps = [node.op for node in target.graph]
    chain = " → ".join(steps if len(steps) <= 12 else [*steps[:11], "…"])
    title = target.title.replace('"', "'").replace("\\", "/")
    return f"{title}: {what}.\n\nComputes {chain} in one pass over memory.\n"


def dtypes(target: Target) -> str:
    """The floating dtype that the region works in, as the DTYPES literal."""
    floats = [spec.dtype for spec in target.inputs if spec.dtype in ("float32", "bfloat16", "float16")]
    return repr([floats[0]] if floats else []).replace("'", '"')


def signature(target: Target) -> str:
    """Inputs positionally, constants by keyword with the captured values as defaults."""
    names = [spec.name for spec in target.inputs]
    return ", ".join([*names, *(f"{name}={_scalar(value)}" for name, value in target.constants.items())])


def _scalar(value: Scalar) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def _argtypes(plan: Plan) -> str:
    pointers = len(plan.inputs) + len(plan.outputs)
    numbers = len(plan.symbols) + len(stride_names(plan))
    parts = [
        (pointers, "ctypes.c_void_p"),
        (numbers, "ctypes.c_int64"),
        (len(constant_names(plan)), "ctypes.c_float"),
    ]
    return " + ".join(f"[{kind}] * {count}" if count > 1 else f"[{kind}]" for count, kind in parts if count)


def _permuted(tensor: Tensor) -> bool:
    return not tensor.strided and tensor.order != tuple(range(len(tensor.order)))


def _body(plan: Plan) -> list[str]:
    lines = [line for tensor in plan.inputs for line in prepare(tensor)]
    lines += read_symbols(plan)
    names = out_names(plan)
    lines += [f"{name} = {allocate(tensor, '')}" for name, tensor in zip(names, plan.outputs, strict=True)]
    arguments = [f"{tensor.name}.data_ptr()" for tensor in plan.inputs] + [f"{name}.data_ptr()" for name in names]
    arguments += [*plan.symbols, *(stride_value(plan, name) for name in stride_names(plan)), *constant_names(plan)]
    call = f"_kernel()({', '.join(arguments)})"
    if len(call) > 110:
        call = "_kernel()(\n        " + ",\n        ".join(arguments) + ",\n    )"
    return [*lines, call, f"return {', '.join(names)}"]


def read_symbols(plan: Plan) -> list[str]:
    """Python lines that read the sizes."""
    inputs = plan.target.inputs
    return [f"{name} = {inputs[index].name}.shape[{place}]" for name, (index, place) in plan.symbols.items()]


def stride_value(plan: Plan, name: str) -> str:
    """Python source of a run-time stride."""
    for tensor in plan.inputs:
        for place in range(len(tensor.shape)):
            if name == f"{tensor.name}_stride{place}":
                return f"{tensor.name}.stride({place})"
    raise KeyError(name)


def prepare(tensor: Tensor) -> list[str]:
    """Python lines that bring an input into the layout that the kernel reads."""
    name, lines = tensor.name, []
    if tensor.paired:
        lines.append(f"{name} = {name}.resolve_conj()")
    if tensor.strided:
        unit = [place for place in range(len(tensor.shape)) if _has_unit(tensor, place)]
        lines += [f"{name} = {name} if {name}.stride({place}) == 1 else {name}.contiguous()" for place in unit[:1]]
    elif _permuted(tensor):
        lines.append(f"{name} = _in_order({name}, {tensor.order})")
    elif tensor.shape:
        lines.append(f"{name} = {name}.contiguous()")
    return lines


def _has_unit(tensor: Tensor, place: int) -> bool:
    used = {c.stride for c in tensor.coefficients.values() if c.stride}
    return tensor.shape[place] != ONE and f"{tensor.name}_stride{place}" not in used


def allocate(tensor: Tensor, device: str) -> str:
    """Python source of an output's allocation, in the reference's layout."""
    in_order = tensor.order == tuple(range(len(tensor.order)))
    shape = [tensor.shape[place].text for place in tensor.order]
    text = f"torch.empty(({_tuple(shape)}), dtype=torch.{tensor.dtype}{device})"
    if in_order:
        return text
    back = sorted(range(len(tensor.order)), key=tensor.order.__getitem__)
    return f"{text}.permute({tuple(back)})"


def _tuple(parts: list[str]) -> str:
    return ", ".join(parts) + ("," if len(parts) == 1 else "")

"""Known kernels: a file of kernels/ specialised to a target by an adapter in the target's own signature.

The known source stays as it is, its `kernel_fn` renamed; the adapter orders arguments, fixes constants and picks
outputs. A call that does not fit costs one experiment, for the judge checks the result, so recognition here is light:
the target's kind and the roles of its inputs.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agent.machine import is_rocm
from agent.proposers.playbook.attention import Attention, find_attention, live_statements, ungrouped
from agent.proposers.playbook.cpp_file import signature
from agent.proposers.playbook.ideas import Idea
from agent.records import Brief
from harness.records import Role, Target, TensorSpec

CORE = "known_kernel"
DEVICES: Mapping[str, tuple[str, ...]] = {"cpu": ("cpp",), "cuda": ("triton", "cuda")}
Body = list[str]


def ideas(brief: Brief, root: Path) -> Iterator[Idea]:
    """Kernels of `root` whose operation the target is."""
    op = OPERATIONS.get(brief.target.kind)
    if op is None:
        return
    for backend in backends(brief.device, rocm=is_rocm()):
        for path in _files(root / backend, op):
            source = path.read_text(encoding="utf-8")
            body = ADAPTERS[op](brief.target, source)
            if body is not None:
                yield Idea(
                    tactic=f"known {backend} {path.stem}",
                    backend=backend,
                    source=specialised(source, brief.target, body),
                    description=f"{backend} {path.stem} of the starter kernels, in this target's signature",
                    hypothesis="a kernel written for this operation moves each byte once",
                )


def backends(device: str, *, rocm: bool) -> tuple[str, ...]:
    """Whose files can run there: CUDA C++ needs nvcc and an NVIDIA GPU."""
    return tuple(backend for backend in DEVICES[device] if not (rocm and backend == "cuda"))


def _files(folder: Path, op: str) -> list[Path]:
    """The kernel of an operation and its variants."""
    return [path for path in [folder / f"{op}.py", *sorted(folder.glob(f"{op}__*.py"))] if path.is_file()]


def specialised(source: str, target: Target, body: Body) -> str:
    """The known file with an adapter as its `kernel_fn`."""
    renamed = re.sub(r"\bkernel_fn\b", CORE, source).rstrip()
    lines = "\n".join(f"    {line}" for line in body)
    return f"{renamed}\n\n\ndef kernel_fn({signature(target)}):\n{lines}\n"


def parameters(source: str) -> list[str]:
    """The argument names of a file's `kernel_fn`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "kernel_fn":
            return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return []


def _activations(target: Target) -> list[TensorSpec]:
    return [spec for spec in target.inputs if spec.role is Role.ACTIVATION]


def _weights(target: Target) -> list[str]:
    return [spec.name for spec in target.inputs if spec.role is Role.WEIGHT]


def _number(target: Target, op: str) -> str | None:
    """The number that a node of this kind adds: a constant of the target by name, or a literal."""
    if "eps" in target.constants:
        return "eps"
    for node in target.graph:
        if node.op != op:
            continue
        for argument in (*node.args[1:], *dict(node.kwargs).values()):
            try:
                value = ast.literal_eval(argument)
            except (ValueError, SyntaxError):
                continue
            if isinstance(value, float) and 0.0 < value < 1e-2:
                return argument
    return None


def _norm(target: Target, source: str, *, bias: bool) -> Body | None:
    activations, weights = _activations(target), _weights(target)
    eps = _number(target, "layer_norm" if bias else "add") or ("1e-5" if bias else None)
    if len(activations) != 1 or len(weights) != 1 + bias or eps is None or len(target.outputs) != 1:
        return None
    del source
    return [f"return {CORE}({', '.join([activations[0].name, *weights])}, {eps})"]


def _add_norm(target: Target, source: str, *, bias: bool) -> Body | None:
    activations, weights = _activations(target), _weights(target)
    eps = _number(target, "layer_norm" if bias else "add") or ("1e-5" if bias else None)
    if len(activations) != 2 or len(weights) != 1 + bias or eps is None:
        return None
    first, second = activations
    if len(second.dims) > len(first.dims):
        first, second = second, first
    other = second.name if second.dims == first.dims else f"{second.name}.expand({first.name}.shape)"
    arguments = ", ".join([first.name, other, *weights, eps])
    if len(target.outputs) == 1:
        if "keep_sum" in parameters(source):
            return [f"return {CORE}({arguments}, keep_sum=False)"]
        return [f"return {CORE}({arguments})[1]"]
    nodes = {node.name: node for node in target.graph}
    if len(target.outputs) != 2 or nodes[target.results[0]].op != "add":
        return None
    return [f"return {CORE}({arguments})"]


def _gelu(target: Target, source: str) -> Body | None:
    del source
    approximate = "tanh" if any(node.op == "tanh" or "tanh" in str(node.kwargs) for node in target.graph) else "none"
    return [f'return {CORE}({target.inputs[0].name}, "{approximate}")'] if len(target.inputs) == 1 else None


def _silu_mul(target: Target, source: str) -> Body | None:
    del source
    gates = [node.args[0] for node in target.graph if node.op in ("silu", "sigmoid")]
    names = [spec.name for spec in target.inputs]
    if len(names) != 2 or len(gates) != 1 or gates[0] not in names:
        return None
    other = names[1 - names.index(gates[0])]
    return [f"return {CORE}({gates[0]}, {other})"]


def _softmax(target: Target, source: str) -> Body | None:
    del source
    ops = [node.op for node in target.graph if node.op not in ("to", "float", "type_as")]
    softmax = next((node for node in target.graph if node.op == "softmax"), None)
    last = softmax is not None and "-1" in (dict(softmax.kwargs).get("dim"), *softmax.args[1:2])
    return [f"return {CORE}({target.inputs[0].name})"] if ops == ["softmax"] and last else None


def _rope_complex(target: Target, source: str) -> Body | None:
    del source
    rotations = [spec.name for spec in target.inputs if spec.dtype == "complex64"]
    rotated = [spec for spec in target.inputs if spec.dtype != "complex64"]
    if len(rotations) != 1 or len(rotated) != 1 or len(target.outputs) != 1 or len(rotated[0].dims) != 4:
        return None
    width = target.inputs[[spec.name for spec in target.inputs].index(rotations[0])].dims[-1]
    return [f"return {CORE}({rotated[0].name}, {rotations[0]}.reshape(-1, {width}))"]


def _rope_half(target: Target, source: str) -> Body | None:
    names = [spec.name for spec in target.inputs]
    rotated = [spec.name for spec in target.inputs if len(spec.dims) == 4 and spec.dims == target.outputs[0].dims]
    tables = {kind: next((name for name in names if kind in name), None) for kind in ("cos", "sin")}
    cos, sin = tables["cos"], tables["sin"]
    if cos is None or sin is None:
        tables_left = [name for name in names if name not in rotated]
        if len(tables_left) != 2:
            return None
        cos, sin = _cos_then_sin(target, tables_left)
    wanted = len(parameters(source)) - 2
    others = [name for name in names if name not in (cos, sin)]
    if len(others) != len(target.outputs):
        return None
    if wanted == len(others):
        return [f"return {CORE}({', '.join([*others, cos, sin])})"]
    if wanted == 1:
        calls = ", ".join(f"{CORE}({name}, {cos}, {sin})" for name in others)
        return [f"return {calls}"]
    return None


def _cos_then_sin(target: Target, tables: list[str]) -> tuple[str, str]:
    """The table that multiplies the input itself is the cosine; the other one multiplies the rotated half."""
    inputs = {spec.name for spec in target.inputs}
    origin = {name: name for name in inputs}
    for node in target.graph:
        if node.op in ("unsqueeze", "view", "reshape", "getitem", "to", "expand") and node.args[0] in origin:
            origin[node.name] = origin[node.args[0]]
    for node in target.graph:
        if node.op == "mul" and all(argument in origin for argument in node.args[:2]):
            pair = [origin[argument] for argument in node.args[:2]]
            cosine = next((name for name in pair if name in tables), tables[0])
            return cosine, next(name for name in tables if name != cosine)
    return tables[0], tables[1]


def _groupnorm(target: Target, source: str) -> Body | None:
    del source
    weights = _weights(target)
    norm = next((node for node in target.graph if node.op == "group_norm"), None)
    eps = _number(target, "group_norm") or "1e-5"
    if norm is None or len(weights) != 2 or len(target.inputs) != 3 or len(target.outputs) != 1:
        return None
    silu = ", silu=True" if target.kind.endswith("silu") else ""
    return [f"return {CORE}({_activations(target)[0].name}, {', '.join(weights)}, {norm.args[1]}, {eps}{silu})"]


def _cross_entropy(target: Target, source: str) -> Body | None:
    del source
    logits = [spec for spec in target.inputs if spec.dtype not in ("int64", "int32")]
    targets = [spec for spec in target.inputs if spec.dtype == "int64"]
    if len(logits) != 1 or len(targets) != 1 or len(logits[0].dims) != 2 or target.outputs[0].dims:
        return None
    return [f"return {CORE}({logits[0].name}, {targets[0].name})"]


def _attention(target: Target, source: str) -> Body | None:
    found, taken = find_attention(target), parameters(source)
    if found is None or len(found.masks) > 1 or (found.masks and not {"mask", "attn_mask"} & set(taken)):
        return None
    keys, values = (ungrouped(target, name) for name in (found.keys, found.values))
    mask = ""
    if found.masks:
        mask = f", attn_mask={found.masks[0]}" if "attn_mask" in taken else f", mask={_additive(target, found)}"
    call = f"{CORE}({found.queries}, {keys}, {values}, False, {found.scale}{mask})"
    return live_statements(target, found, call)


def _additive(target: Target, found: Attention) -> str:
    """The mask as floats to add to the scores."""
    mask = found.masks[0]
    if not _is_boolean(target, mask.removeprefix("~")):
        return mask
    zeros = f"torch.zeros_like({mask.removeprefix('~')}, dtype=torch.float32)"
    return f'{zeros}.masked_fill({_complement(mask)}, float("-inf"))'


def _complement(mask: str) -> str:
    return mask.removeprefix("~") if mask.startswith("~") else f"~{mask}"


def _is_boolean(target: Target, name: str) -> bool:
    dtypes = {spec.name: spec.dtype for spec in target.inputs} | {node.name: node.dtype for node in target.graph}
    return dtypes.get(name) == "bool"


def _linear_gelu(target: Target, source: str) -> Body | None:
    del source
    linears = [node for node in target.graph if node.op == "linear"]
    if len(linears) != 1 or len(target.outputs) != 1 or len(_activations(target)) != 1 or linears[0].kwargs:
        return None
    written_out = any(node.op == "tanh" or "tanh" in str(node.kwargs) for node in target.graph)
    bias = linears[0].args[2] if len(linears[0].args) > 2 else "None"
    arguments = ", ".join([*linears[0].args[:2], bias, '"tanh"' if written_out else '"none"'])
    names = {spec.name for spec in target.inputs} | {"None"}
    return [f"return {CORE}({arguments})"] if {*linears[0].args[:2], bias} <= names else None


def _gated_mlp(target: Target, source: str) -> Body | None:
    """x, gate, up and down, told apart by which product the SiLU reads and which one comes last."""
    del source
    linears = {node.name: node for node in target.graph if node.op == "linear"}
    silu = next((node for node in target.graph if node.op == "silu"), None)
    plain = all(node.args[2:] in ((), ("None",)) and not node.kwargs for node in linears.values())
    if len(linears) != 3 or silu is None or silu.args[0] not in linears or not plain or len(target.outputs) != 1:
        return None
    gate, (*_, down) = linears[silu.args[0]], linears.values()
    ups = [node for node in linears.values() if node is not gate and node is not down]
    if len(ups) != 1 or ups[0].args[0] != gate.args[0]:
        return None
    return [f"return {CORE}({gate.args[0]}, {gate.args[1]}, {ups[0].args[1]}, {down.args[1]})"]


ADAPTERS: Mapping[str, Callable[[Target, str], Body | None]] = {
    "rmsnorm": lambda target, source: _norm(target, source, bias=False),
    "layernorm": lambda target, source: _norm(target, source, bias=True),
    "add_rmsnorm": lambda target, source: _add_norm(target, source, bias=False),
    "add_layernorm": lambda target, source: _add_norm(target, source, bias=True),
    "gelu": _gelu,
    "silu_mul": _silu_mul,
    "softmax": _softmax,
    "rope_complex": _rope_complex,
    "rope_half": _rope_half,
    "groupnorm": _groupnorm,
    "cross_entropy": _cross_entropy,
    "flash_attention": _attention,
    "linear_gelu": _linear_gelu,
    "fused_mlp": _gated_mlp,
}
OPERATIONS: Mapping[str, str] = {
    **{name: name for name in ADAPTERS},
    "groupnorm_silu": "groupnorm",
    "attention": "flash_attention",
    "gated_mlp": "fused_mlp",
}

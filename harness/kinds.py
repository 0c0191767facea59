"""Recognises what a region computes by the structure of its operations, not by any name in the model."""

from collections.abc import Sequence

from harness.partition import Family
from harness.records import OpNode

PASSIVE = frozenset(
    {
        "to",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "contiguous",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "dropout",
        "getitem",
        "chunk",
        "split",
        "detach",
        "expand_as",
        "movedim",
        "t",
        "type",
        "repeat",
    }
)
REDUCTIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "std",
        "prod",
        "logsumexp",
        "norm",
        "var_mean",
        "cumsum",
        "argmax",
        "argmin",
        "any",
        "all",
    }
)
HEAVY_KINDS = (
    ("attention", "attention"),
    ("conv", "conv"),
    ("embedding", "embedding"),
    ("linear", "linear"),
    ("addmm", "linear"),
)
TITLES = {
    "rmsnorm": "RMSNorm",
    "add_rmsnorm": "add + RMSNorm",
    "layernorm": "LayerNorm",
    "add_layernorm": "add + LayerNorm",
    "groupnorm": "GroupNorm",
    "groupnorm_silu": "GroupNorm + SiLU",
    "add_groupnorm_silu": "add + GroupNorm + SiLU",
    "softmax": "softmax",
    "silu_mul": "SiLU · up",
    "gelu_mul": "GELU · up",
    "gelu": "GELU",
    "silu": "SiLU",
    "rope_complex": "RoPE (complex)",
    "rope_interleaved": "RoPE (interleaved)",
    "rope_half": "RoPE (half)",
    "attention": "attention",
    "linear": "linear",
    "matmul": "matmul",
    "conv": "convolution",
    "embedding": "embedding",
    "cross_entropy": "cross-entropy",
    "add": "add",
    "copy": "copy",
    "pointwise": "pointwise",
    "reduction": "reduction",
    "other": "other",
}

FUSED = "fused_"
SIMPLE = ("linear", "matmul", "conv")  # what a fusion of two may start with to be named by both


def kind_of(graph: Sequence[OpNode], family: Family, aten: Sequence[str] = ()) -> str:
    """The kind of a region. `aten` names the aten operators of a heavy one."""
    if family is Family.ATTENTION:
        return "attention"
    if family is Family.HEAVY:
        return _heavy_kind(graph, aten)
    ops = [node.op for node in graph if node.op not in PASSIVE]
    found = set(ops)
    if not ops:
        return "copy"
    for recognise in (_rope_kind, _norm_kind, _activation_kind, _loss_kind):
        kind = recognise(graph, ops, found)
        if kind:
            return kind
    if found <= {"add"} and len(ops) == 1:
        return "add"
    return "reduction" if found & REDUCTIONS else "pointwise"


def fusion_kind(members: Sequence[str]) -> str:
    """The kind of a fusion from those of its regions in order: `linear_gelu`, `rmsnorm_linear`, `gated_mlp`."""
    if list(members[:2]) == ["linear", "linear"] and list(members[2:]) in (
        ["silu_mul", "linear"],
        ["gelu_mul", "linear"],
    ):
        return "gated_mlp" if members[2] == "silu_mul" else "gated_mlp_gelu"
    steps = [kind for index, kind in enumerate(members) if index == 0 or members[index - 1] != kind]
    return FUSED + "__".join(steps) if len(steps) > 2 or steps[0] not in SIMPLE else "_".join(steps)


def fusion_title(kind: str) -> str:
    """A fusion's kind for people."""
    if kind.startswith("gated_mlp"):
        return "gated MLP"
    if kind.startswith(FUSED):
        return " + ".join(TITLES[step] for step in kind.removeprefix(FUSED).split("__"))
    first = next(step for step in SIMPLE if kind.startswith(f"{step}_"))
    return f"{TITLES[first]} + {TITLES[kind.removeprefix(first + '_')]}"


def _heavy_kind(graph: Sequence[OpNode], aten: Sequence[str]) -> str:
    names = [*(node.op for node in graph), *aten]
    for stem, kind in HEAVY_KINDS:
        if any(stem in name for name in names):
            return kind
    return "matmul" if any(name in ("matmul", "mm", "bmm", "einsum", "baddbmm") for name in names) else "other"


def _rope_kind(graph: Sequence[OpNode], ops: Sequence[str], found: set[str]) -> str | None:
    if "view_as_complex" in found and "mul" in found and "view_as_real" in found:
        return "rope_complex"
    multiplies = ops.count("mul") >= 2 and bool(found & {"add", "sub"})
    if not multiplies or found & REDUCTIONS:
        return None
    if "stack" in found:
        return "rope_interleaved"
    if "cat" not in found:
        return None
    stepped = any(", None, 2)" in part for node in graph if node.op == "getitem" for part in node.args)
    return "rope_interleaved" if stepped else "rope_half" if "neg" in found or "sub" in found else None


def _norm_kind(graph: Sequence[OpNode], ops: Sequence[str], found: set[str]) -> str | None:
    for name, kind in (("layer_norm", "layernorm"), ("rms_norm", "rmsnorm"), ("group_norm", "groupnorm")):
        if name in found and len([op for op in ops if op == name]) == 1:
            return _dressed(kind, ops[: ops.index(name)], ops[ops.index(name) + 1 :])
    squares = {"pow", "square"} & found or _multiplies_itself(graph)
    roots = {"rsqrt", "sqrt"} & found
    if squares and roots and "mean" in found and "var" not in found and not found & {"sub"}:
        first = next(index for index, op in enumerate(ops) if op in ("pow", "square", "mul", "mean"))
        last = max(index for index, op in enumerate(ops) if op in ("rsqrt", "sqrt"))
        after = [op for op in ops[last + 1 :] if op not in ("mul", "div", "reciprocal")]
        return _dressed("rmsnorm", ops[:first], after)
    if roots and "mean" in found and "sub" in found and (squares or found & {"var", "var_mean"}):
        before = ops[: ops.index("mean")]
        return _dressed("layernorm", [op for op in before if op == "add"], [])
    return None


def _multiplies_itself(graph: Sequence[OpNode]) -> bool:
    return any(node.op == "mul" and len(node.args) == 2 and node.args[0] == node.args[1] for node in graph)


def _dressed(kind: str, before: Sequence[str], after: Sequence[str]) -> str | None:
    """A norm with what stands before and after it; None when that is more than is known."""
    rest = list(after)
    if kind == "groupnorm" and rest == ["silu"]:
        kind, rest = "groupnorm_silu", []
    if rest or any(op != "add" for op in before) or len(before) > 1:
        return None
    return f"add_{kind}" if before else kind


def _activation_kind(graph: Sequence[OpNode], ops: Sequence[str], found: set[str]) -> str | None:
    if found == {"softmax"}:
        return "softmax"
    if found in ({"silu", "mul"}, {"sigmoid", "mul"}) and ops.count("mul") == (1 if "silu" in found else 2):
        return "silu_mul"
    if found == {"silu"} or (found == {"sigmoid", "mul"} and ops.count("mul") == 1):
        return "silu"
    if found == {"gelu", "mul"} and len(ops) == 2:
        return "gelu_mul"
    written_out = ("tanh" in found and ("pow" in found or ops.count("mul") >= 5)) or "erf" in found
    if found == {"gelu"} or (written_out and found <= {"tanh", "erf", "pow", "mul", "add", "div"}):
        return "gelu"
    del graph
    return None


def _loss_kind(graph: Sequence[OpNode], ops: Sequence[str], found: set[str]) -> str | None:
    del graph, ops
    if "cross_entropy" in found or {"log_softmax", "nll_loss"} <= found:
        return "cross_entropy"
    return None

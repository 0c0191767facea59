"""Hand-written targets: regions as the capture writes them, each with its graph and the reference in PyTorch."""

from dataclasses import replace

from harness.records import OpNode, Role, Target, TensorSpec

INFIX = {"add": "+", "mul": "*", "sub": "-", "div": "/"}
FUNCTIONAL = ("silu", "gelu", "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "relu", "softplus")
TORCH = ("view_as_complex", "view_as_real", "cat", "stack", "rsqrt", "tanh", "exp", "erf", "sigmoid", "where", "amax",
         "sqrt", "abs", "maximum", "minimum", "log", "amin", "var", "matmul")  # fmt: skip
KEEP = (("keepdim", "True"),)


def spec(name, shape, dims=None, dtype="float32", role=Role.ACTIVATION, stride=None):
    if stride is None:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= size
    return TensorSpec(name, role, dtype, tuple(shape), tuple(stride), tuple(dims or shape))


def node(name, op, *args, **kwargs):
    return OpNode(name, op, args, tuple(kwargs.items()), None, None)


def statement(step):
    words = [*step.args, *(f"{key}={value}" for key, value in step.kwargs)]
    if step.op in INFIX and not step.kwargs:
        return f"{step.name} = {step.args[0]} {INFIX[step.op]} {step.args[1]}"
    if step.op == "getitem":
        return f"{step.name} = {step.args[0]}[{step.args[1]}]"
    if step.op == "neg":
        return f"{step.name} = -{step.args[0]}"
    if step.op in FUNCTIONAL:
        return f"{step.name} = F.{step.op}({', '.join(words)})"
    if step.op in TORCH:
        return f"{step.name} = torch.{step.op}({', '.join(words)})"
    return f"{step.name} = {words[0]}.{step.op}({', '.join(words[1:])})"


def target(name, kind, inputs, graph, results, outputs, **constants):
    given = ", ".join(item.name for item in inputs)
    keywords = "".join(f", {key}" for key in constants)
    head = f"def reference({given}{', *' + keywords if keywords else ''}):"
    lines = [f"    {statement(step)}" for step in graph]
    reference = "\n".join(["import torch", "import torch.nn.functional as F", "", head, *lines])
    symbols = {
        dim: size for item in inputs for dim, size in zip(item.dims, item.shape, strict=True) if isinstance(dim, str)
    }
    return Target(
        id=name, kind=kind, title=name, key=name, inputs=tuple(inputs), constants=constants, outputs=tuple(outputs),
        graph=tuple(graph), results=tuple(results), reference=f"{reference}\n    return {', '.join(results)}\n",
        bindings=(symbols,), call_sites=(), flops=0, bytes=0,
    )  # fmt: skip


ROWS = ("B", "S", 96)
X, R = spec("x", (2, 5, 96), ROWS), spec("r", (2, 5, 96), ROWS)
W, BIAS = spec("w", (96,), role=Role.WEIGHT), spec("b", (96,), role=Role.WEIGHT)
OUT = spec("out", (2, 5, 96), ROWS)


def add_rmsnorm():
    graph = [
        node("s", "add", "x", "r"),
        node("wide", "to", "s", "torch.float32"),
        node("p", "pow", "wide", "2"),
        node("m", "mean", "p", "-1", keepdim="True"),
        node("e", "add", "m", "eps"),
        node("q", "rsqrt", "e"),
        node("n", "mul", "wide", "q"),
        node("t", "to", "n", "torch.float32"),
        node("y", "mul", "w", "t"),
    ]
    return target("add_rmsnorm", "add_rmsnorm", [X, R, W], graph, ["s", "y"], [OUT, OUT], eps=1e-6)


def add_rmsnorm_bf16():
    narrow = [replace(item, dtype="bfloat16") for item in (X, R, W)]
    out = replace(OUT, dtype="bfloat16")
    graph = [replace(step, args=("n", "torch.bfloat16")) if step.name == "t" else step for step in add_rmsnorm().graph]
    return target("add_rmsnorm_bf16", "add_rmsnorm", narrow, graph, ["s", "y"], [out, out], eps=1e-6)


def silu_mul():
    return target("silu_mul", "silu_mul", [X, R], [node("a", "silu", "x"), node("y", "mul", "a", "r")], ["y"], [OUT])


def packed_silu_mul():
    packed = spec("x", (2, 5, 192), ("B", "S", 192))
    graph = [
        node("both", "chunk", "x", "2", dim="-1"),
        node("gate", "getitem", "both", "0"),
        node("up", "getitem", "both", "1"),
        node("a", "silu", "gate"),
        node("y", "mul", "a", "up"),
    ]
    return target("packed_silu_mul", "silu_mul", [packed], graph, ["y"], [OUT])


def gelu_written_out():
    graph = [
        node("p", "pow", "x", "3.0"),
        node("a", "mul", "p", "0.044715"),
        node("c", "add", "x", "a"),
        node("d", "mul", "c", "0.7978845608028654"),
        node("t", "tanh", "d"),
        node("h", "mul", "x", "0.5"),
        node("v", "add", "t", "1.0"),
        node("y", "mul", "h", "v"),
    ]
    return target("gelu_written_out", "gelu", [X], graph, ["y"], [OUT])


def gelu():
    return target("gelu", "gelu", [X], [node("y", "gelu", "x")], ["y"], [OUT])


def rope_complex():
    x = spec("x", (2, 5, 4, 16), ("B", "S", 4, 16))
    table = spec("table", (5, 8), ("S", 8), dtype="complex64")
    graph = [
        node("wide", "float", "x"),
        node("pairs", "reshape", "wide", "x.shape[0]", "x.shape[1]", "4", "8", "2"),
        node("z", "view_as_complex", "pairs"),
        node("turn", "view", "table", "1", "x.shape[1]", "1", "8"),
        node("turned", "mul", "z", "turn"),
        node("parts", "view_as_real", "turned"),
        node("flat", "flatten", "parts", "3"),
        node("y", "type_as", "flat", "x"),
    ]
    return target("rope_complex", "rope_complex", [x, table], graph, ["y"], [x])


def half_rotation(name):
    return [
        node(f"{name}1", "getitem", name, "..., slice(None, 8, None)"),
        node(f"{name}2", "getitem", name, "..., slice(8, None, None)"),
        node(f"{name}n", "neg", f"{name}2"),
        node(f"{name}h", "cat", f"({name}n, {name}1)", dim="-1"),
        node(f"{name}a", "mul", name, "c"),
        node(f"{name}b", "mul", f"{name}h", "s"),
        node(f"{name}o", "add", f"{name}a", f"{name}b"),
    ]


def rope_half():
    """Grouped queries: two outputs with different numbers of heads, inputs transposed views."""
    q = spec("q", (2, 4, 5, 16), ("B", 4, "S", 16), stride=(320, 16, 64, 1))
    k = spec("k", (2, 2, 5, 16), ("B", 2, "S", 16), stride=(160, 16, 32, 1))
    cos, sin = spec("cos", (2, 5, 16), ("B", "S", 16)), spec("sin", (2, 5, 16), ("B", "S", 16))
    graph = [node("c", "unsqueeze", "cos", "1"), node("s", "unsqueeze", "sin", "1")]
    graph += [*half_rotation("q"), *half_rotation("k")]
    return target("rope_half", "rope_half", [q, k, cos, sin], graph, ["qo", "ko"], [q, k])


def rope_interleaved():
    x = spec("x", (2, 5, 4, 16), ("B", "S", 4, 16))
    cos, sin = spec("cos", (5, 1, 8), ("S", 1, 8)), spec("sin", (5, 1, 8), ("S", 1, 8))
    graph = [
        node("even", "getitem", "x", "..., slice(None, None, 2)"),
        node("odd", "getitem", "x", "..., slice(1, None, 2)"),
        node("a", "mul", "even", "cos"),
        node("b", "mul", "odd", "sin"),
        node("first", "sub", "a", "b"),
        node("c", "mul", "even", "sin"),
        node("d", "mul", "odd", "cos"),
        node("second", "add", "c", "d"),
        node("both", "stack", "(first, second)", dim="-1"),
        node("y", "flatten", "both", "-2"),
    ]
    return target("rope_interleaved", "rope_interleaved", [x, cos, sin], graph, ["y"], [x])


def layernorm_after_add():
    graph = [node("s", "add", "x", "r"), node("y", "layer_norm", "s", "(96,)", "w", "b", "1e-5")]
    return target("layernorm_after_add", "add_layernorm", [X, R, W, BIAS], graph, ["y"], [OUT])


def masked_softmax():
    scores, mask = spec("scores", (2, 3, 5, 7), ("B", 3, "S", "T")), spec("mask", (5, 7), ("S", "T"))
    graph = [
        node("d", "div", "scores", "5.656854"),
        node("a", "add", "d", "mask"),
        node("y", "softmax", "a", dim="-1"),
    ]
    return target("masked_softmax", "softmax", [scores, mask], graph, ["y"], [scores])


def filled_softmax():
    scores = spec("scores", (2, 3, 5, 7), ("B", 3, "S", "T"))
    mask = spec("mask", (5, 7), ("S", "T"), dtype="bool", role=Role.MASK)
    graph = [node("a", "masked_fill", "scores", "mask", "-1e9"), node("y", "softmax", "a", dim="-1")]
    return target("filled_softmax", "softmax", [scores, mask], graph, ["y"], [scores])


def groupnorm_silu():
    image = spec("image", (2, 12, 6, 7), ("B", 12, "H", "W"))
    w, b = spec("w", (12,), role=Role.WEIGHT), spec("b", (12,), role=Role.WEIGHT)
    graph = [node("n", "group_norm", "image", "3", "w", "b", "1e-5"), node("y", "silu", "n")]
    return target("groupnorm_silu", "groupnorm_silu", [image, w, b], graph, ["y"], [image])


def bias_relu_of_an_image():
    image, b = spec("image", (2, 12, 6, 7), ("B", 12, "H", "W")), spec("b", (12,), role=Role.WEIGHT)
    graph = [
        node("v", "view", "b", "1", "-1", "1", "1"),
        node("a", "add", "image", "v"),
        node("y", "relu", "a"),
    ]
    return target("bias_relu", "pointwise", [image, b], graph, ["y"], [image])


def residual_chain():
    graph = [
        node("a", "add", "x", "r"),
        node("c", "mul", "a", "0.5"),
        node("e", "sigmoid", "c"),
        node("y", "mul", "e", "a"),
        node("z", "sub", "y", "x"),
    ]
    return target("residual_chain", "pointwise", [X, R], graph, ["a", "z"], [OUT, OUT])


def row_statistics():
    """Outputs that vary by row alone, and one that is cast."""
    narrow = spec("narrow", (2, 5), ("B", "S"), dtype="bfloat16")
    graph = [
        node("top", "amax", "x", "-1"),
        node("total", "sum", "x", "-1"),
        node("short", "to", "total", "torch.bfloat16"),
    ]
    return target("row_statistics", "reduction", [X], graph, ["top", "short"], [spec("o", (2, 5), ("B", "S")), narrow])


def heads_to_rows():
    """A transposed input written in another order: the reshape in front of an output projection, with a gate."""
    heads = spec("heads", (2, 4, 5, 16), ("B", 4, "S", 16))
    gate = spec("gate", (2, 5, 64), ("B", "S", 64))
    graph = [
        node("t", "transpose", "heads", "1", "2"),
        node("flat", "reshape", "t", "heads.shape[0]", "heads.shape[2]", "64"),
        node("y", "mul", "flat", "gate"),
    ]
    return target("heads_to_rows", "pointwise", [heads, gate], graph, ["y"], [spec("o", (2, 5, 64), ("B", "S", 64))])


def head_norm():
    """RMSNorm over the head dimension, then a half rotation: a reduction over an unrolled axis."""
    x = spec("x", (2, 4, 5, 16), ("B", 4, "S", 16))
    c, s = spec("c", (5, 16), ("S", 16)), spec("s", (5, 16), ("S", 16))
    w = spec("w", (16,), role=Role.WEIGHT)
    graph = [node("q", "rms_norm", "x", "(16,)", "w", "1e-6"), *half_rotation("q")]
    return target("head_norm", "other", [x, c, s, w], graph, ["qo"], [x])


def written_out_layernorm():
    graph = [
        node("m", "mean", "x", "-1", keepdim="True"),
        node("d", "sub", "x", "m"),
        node("v", "var", "x", "-1", keepdim="True", correction="0"),
        node("e", "add", "v", "1e-05"),
        node("q", "sqrt", "e"),
        node("n", "div", "d", "q"),
        node("a", "mul", "n", "w"),
        node("y", "add", "a", "b"),
    ]
    return target("written_out_layernorm", "layernorm", [X, W, BIAS], graph, ["y"], [OUT])


def attention(*, grouped=True, boolean=False):
    q, k, v = (spec(n, (2, 6, h, 16), ("B", "S", h, 16)) for n, h in (("q", 4), ("k", 2), ("v", 2)))
    mask = spec("mask", (6, 6), ("S", "S"), dtype="bool" if boolean else "float32", role=Role.MASK)
    shape = ("q.shape[0]", "q.shape[1]")
    every = "slice(None, None, None)"

    def repeated(name):
        return [
            node(f"{name}5", "getitem", name, f"{every}, {every}, {every}, None, {every}"),
            node(f"{name}x", "expand", f"{name}5", *shape, "2", "2", "16"),
            node(f"{name}r", "reshape", f"{name}x", *shape, "-1", "16"),
            node(f"{name}t", "transpose", f"{name}r", "1", "2"),
        ]

    masked = (
        [node("off", "logical_not", "mask"), node("b", "masked_fill", "d", "off", 'float("-inf")')]
        if boolean
        else [node("b", "add", "d", "mask")]
    )
    graph = [
        node("qt", "transpose", "q", "1", "2"),
        *repeated("k"),
        node("kk", "transpose", "kt", "-2", "-1"),
        node("p", "matmul", "qt", "kk"),
        node("d", "div", "p", "4.0"),
        *masked,
        node("wide", "float", "b"),
        node("weights", "softmax", "wide", dim="-1"),
        node("same", "to", "weights", "torch.float32"),
        *repeated("v"),
        node("mixed", "matmul", "same", "vt"),
        node("back", "transpose", "mixed", "1", "2"),
        node("y", "reshape", "back", *shape, "64"),
    ]
    return target("attention", "attention", [q, k, v, mask], graph, ["y"], [spec("o", (2, 6, 64), ("B", "S", 64))])


REGIONS = (
    add_rmsnorm, add_rmsnorm_bf16, silu_mul, packed_silu_mul, gelu_written_out, gelu, rope_complex, rope_half,
    rope_interleaved, layernorm_after_add, masked_softmax, filled_softmax, groupnorm_silu, bias_relu_of_an_image,
    residual_chain, row_statistics, heads_to_rows, head_norm, written_out_layernorm,
)  # fmt: skip

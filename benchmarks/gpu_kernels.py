"""Checks and times every GPU kernel file on this machine's device, and sweeps the tunables of the memory-bound ones.

Times are CUDA-graph replays over four rotated input sets after an L2 flush, median; the bound is the compulsory bytes
at the measured copy rate. Needs torch with CUDA, Triton and nvcc, nothing of `agent` or `harness`:

    python benchmarks/gpu_kernels.py --check --time --tune --compile --seconds 190
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202, D103, FBT001, FBT002, N812
# References are written as torch code is, unannotated.

import argparse
import ast
import concurrent.futures
import hashlib
import importlib.util
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
SCRATCH = Path(tempfile.gettempdir()) / "overnight-bench"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SETS = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: only to check Triton files in its interpreter


# ------------------------------------------------------------------ the kernel files


def tunables(file: Path) -> dict[str, list[Any]]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TUNABLES":
            return ast.literal_eval(node.value)
    return {}


def with_choice(source: str, choice: dict[str, Any]) -> str:
    """The source with the chosen values first in TUNABLES, which makes them the current ones."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TUNABLES":
            values = ast.literal_eval(node.value)
            for name, value in choice.items():
                values[name] = [value, *(v for v in values[name] if v != value)]
            lines = source.splitlines(keepends=True)
            lines[node.lineno - 1 : node.end_lineno] = [f"TUNABLES = {values!r}\n"]
            return "".join(lines)
    return source


def load(file: Path, choice: dict[str, Any] | None = None) -> Any:
    if choice:
        source = with_choice(file.read_text(), choice)
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        SCRATCH.mkdir(exist_ok=True)
        file = SCRATCH / f"{file.parent.name}_{file.stem}_{key}.py"
        file.write_text(source)
    spec = importlib.util.spec_from_file_location(f"kernel_{file.parent.name}_{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ references and inputs


def rmsnorm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rmsnorm_as_models_have_it(x, weight, eps=1e-6):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rounded_sum(x, residual, kind):
    return (x + residual).to(kind).to(x.dtype)


def rotary(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rotate_half(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rope_complex(x, turns):
    pairs = torch.view_as_complex((x if x.dtype == torch.float64 else x.float()).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).to(x.dtype)


def mlp(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def attention(q, k, v, causal=True, sm_scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


def attention_by_hand(q, k, v, causal=True, sm_scale=None):
    score = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if causal:
        score = score.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.softmax(score, -1) @ v


def rand(*shape, dtype, scale=1.0, offset=0.0):
    return (torch.randn(shape, device=DEVICE) * scale + offset).to(dtype)


def table(seq, width, dtype):
    angle = torch.arange(seq, device=DEVICE)[:, None] * 10000.0 ** (-torch.arange(width, device=DEVICE) / width)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def strided(x):
    """The same values behind a stride: every second element of a wider tensor."""
    return torch.stack((x, x), -1)[..., 0]


# ------------------------------------------------------------------ correctness


def row_inputs(dtype, weights, both=False):
    """Argument tuples for ops over the last dimension: usual, ragged, single, empty, strided, offset and long rows."""
    shapes = [(64, 4096), (67, 129), (33, 1000), (5, 8209), (1, 1), (3, 1), (1, 7), (257, 3), (0, 16), (2, 3, 768)]
    shapes += [(7, 50257), (3, 70001), (2, 128256), (300, 2048)]
    for shape in shapes:
        x = rand(*shape, dtype=dtype, scale=2.0, offset=0.5)
        extra = [rand(*shape, dtype=dtype)] if both else []
        yield str(shape), (x, *extra, *(rand(shape[-1], dtype=dtype) for _ in range(weights))), {}
    x = strided(rand(33, 514, dtype=dtype))
    extra = [rand(33, 514, dtype=dtype)] if both else []
    yield "strided", (x, *extra, *(rand(514, dtype=dtype) for _ in range(weights))), {}
    x = rand(512, 40, dtype=dtype).T
    extra = [rand(40, 512, dtype=dtype)] if both else []
    yield "transposed", (x, *extra, *(rand(512, dtype=dtype) for _ in range(weights))), {}
    x = rand(1 + 12 * 256, dtype=dtype)[1:].view(12, 256)
    extra = [rand(12, 256, dtype=dtype)] if both else []
    yield "offset", (x, *extra, *(rand(256, dtype=dtype) for _ in range(weights))), {}


def checks(name: str, dtype: torch.dtype):
    op = name.partition("__")[0]
    if op in ("softmax", "reduce"):
        yield from row_inputs(dtype, 0)
        x = rand(4, 1000, dtype=dtype)
        x[0] = -math.inf
        x[1, 3] = math.inf
        x[2, 5] = math.nan
        x[3, :999] = -math.inf
        if op == "softmax":
            yield "special", (x,), {}
            long = rand(3, 60000, dtype=dtype)
            long[0] = -math.inf
            long[1, 3] = math.inf
            long[2, :50000] = -math.inf
            yield "special long", (long,), {}
            yield "large", (rand(16, 4096, dtype=dtype, scale=300.0),), {}
        if op == "reduce":
            yield "few long rows", (rand(2, 3_000_001, dtype=dtype, offset=1.0),), {}
            yield "one dimension", (rand(100_000, dtype=dtype, offset=1.0),), {}
            yield "no columns", (rand(5, 0, dtype=dtype),), {}
    elif op == "rmsnorm":
        yield from row_inputs(dtype, 1)
    elif op == "layernorm":
        yield from row_inputs(dtype, 2)
    elif op == "add_rmsnorm":
        yield from row_inputs(dtype, 1, both=True)
    elif op == "add_layernorm":
        yield from row_inputs(dtype, 2, both=True)
    elif op == "cross_entropy":
        for rows, columns in ((64, 4096), (67, 129), (7, 1000), (5, 8209), (1, 1), (257, 3), (6, 128256), (5, 50257)):
            x = rand(rows, columns, dtype=dtype, scale=3.0)
            yield f"{rows, columns}", (x, torch.randint(columns, (rows,), device=DEVICE)), {}
        target = torch.tensor([3, -100, 5], device=DEVICE)
        x = rand(3, 9001, dtype=dtype)
        x[0, :8000:2] = -math.inf
        yield "ignored and -inf", (x, target), {}
    elif op in ("gelu", "silu_mul"):
        for shape in ((64, 3072), (1,), (0, 5), (67, 129), (3, 5, 7), (12289,)):
            count = 2 if op == "silu_mul" else 1
            yield str(shape), tuple(rand(*shape, dtype=dtype, scale=3.0) for _ in range(count)), {}
        if op == "gelu":
            yield "tanh", (rand(64, 300, dtype=dtype, scale=3.0),), {"approximate": "tanh"}
            special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -30.0, 30.0, -1e4, 1e4], device=DEVICE).to(
                dtype
            )
            yield "special", (special,), {}
            yield "special tanh", (special,), {"approximate": "tanh"}
            yield "transposed", (rand(48, 64, dtype=dtype).T,), {}
        else:
            yield "halves", tuple(rand(5, 7, 512, dtype=dtype).chunk(2, -1)), {}
            yield "odd halves", tuple(rand(5, 7, 510, dtype=dtype).chunk(2, -1)), {}
    elif op == "rotary_embedding":
        for shape in ((2, 4, 128, 128), (2, 3, 67, 64), (1, 5, 33, 32), (3, 1, 129, 128), (1, 1, 1, 2), (2, 1, 3, 6)):
            yield str(shape), (rand(*shape, dtype=dtype), *table(shape[2], shape[3] // 2, dtype)), {}
        yield "transposed", (rand(2, 40, 3, 64, dtype=dtype).transpose(1, 2), *table(40, 32, dtype)), {}
    elif op == "rope_half":
        for shape in ((2, 4, 128, 128), (2, 3, 67, 64), (1, 5, 33, 80), (1, 1, 1, 2), (2, 1, 3, 6)):
            cos, sin = (t.repeat(1, 2) for t in table(shape[2], shape[3] // 2, dtype))
            q = rand(*shape, dtype=dtype)
            k = rand(shape[0], 2, *shape[2:], dtype=dtype)
            yield str(shape), ((q, k) if name.endswith("pair") else (q,)) + (cos, sin), {}
        q = rand(2, 40, 9, 64, dtype=dtype).transpose(1, 2)
        k = rand(2, 40, 3, 64, dtype=dtype).transpose(1, 2)
        cos, sin = (t.repeat(1, 2)[None, None] for t in table(40, 32, dtype))
        yield "transposed", ((q, k) if name.endswith("pair") else (q,)) + (cos, sin), {}
    elif op == "rope_complex":
        for shape in ((2, 128, 4, 128), (2, 67, 3, 64), (1, 33, 12, 80), (1, 1, 1, 2)):
            cos, sin = table(shape[1], shape[3] // 2, torch.float32)
            x = rand(*shape, dtype=dtype)
            k = rand(*shape[:2], 2, shape[3], dtype=dtype)
            yield str(shape), ((x, k) if name.endswith("pair") else (x,)) + (torch.complex(cos, sin),), {}
    elif op == "groupnorm":
        for shape, groups in (((2, 256, 64, 64), 32), ((3, 12, 7, 5), 4), ((2, 64, 56, 56), 8), ((1, 8, 300, 300), 2)):
            weights = rand(shape[1], dtype=dtype), rand(shape[1], dtype=dtype)
            x = rand(*shape, dtype=dtype, offset=0.5)
            yield str(shape), (x, *weights, groups, 1e-5), {}
            yield f"{shape} silu", (x, *weights, groups, 1e-5), {"silu": True}
    elif op == "matmul":
        for m, n, k in (
            (512, 512, 512),
            (67, 129, 33),
            (1, 1, 1),
            (3, 5, 0),
            (0, 4, 8),
            (256, 1000, 520),
            (300, 64, 4096),
        ):
            yield f"{m, n, k}", (rand(m, k, dtype=dtype), rand(k, n, dtype=dtype)), {}
        yield "transposed", (rand(200, 136, dtype=dtype).T, rand(72, 200, dtype=dtype).T), {}
        yield "batched", (rand(3, 40, 64, dtype=dtype), rand(3, 64, 56, dtype=dtype)), {}
        yield "broadcast", (rand(3, 40, 64, dtype=dtype), rand(64, 56, dtype=dtype)), {}
        yield "vector", (rand(40, 64, dtype=dtype), rand(64, dtype=dtype)), {}
    elif op == "flash_attention":
        for shape in (
            (1, 2, 256, 128),
            (2, 3, 67, 64),
            (1, 2, 129, 32),
            (1, 1, 255, 128),
            (0, 2, 16, 64),
            (1, 1, 1, 64),
        ):
            args = tuple(rand(*shape, dtype=dtype) for _ in range(3))
            yield str(shape), args, {}
            yield f"{shape} full", args, {"causal": False}
        args = tuple(rand(1, 3, 70, 80, dtype=dtype) for _ in range(3))
        yield "scale", args, {"sm_scale": 0.3}
        yield "transposed", tuple(rand(2, 300, 4, 64, dtype=dtype).transpose(1, 2) for _ in range(3)), {}
    elif op == "linear_gelu":
        for rows, inner, width in ((256, 512, 384), (67, 129, 33), (1, 64, 176), (0, 8, 8), (2048, 768, 3072)):
            x, weight = rand(rows, inner, dtype=dtype), rand(width, inner, dtype=dtype, scale=inner**-0.5)
            yield f"{rows, inner, width}", (x, weight, rand(width, dtype=dtype)), {}
            yield f"{rows, inner, width} tanh", (x, weight), {"approximate": "tanh"}
    elif op == "fused_mlp":
        for rows, inner, hidden in ((128, 256, 512), (67, 129, 33), (1, 64, 176)):
            weights = [rand(hidden, inner, dtype=dtype, scale=inner**-0.5) for _ in range(2)]
            down = rand(inner, hidden, dtype=dtype, scale=hidden**-0.5)
            yield f"{rows, inner, hidden}", (rand(rows, inner, dtype=dtype), *weights, down), {}


def truth(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in float64; where a model rounds a sum before it goes on, so does this."""
    wide = tuple(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args)
    wide = tuple(a.to(torch.complex128) if torch.is_tensor(a) and a.is_complex() else a for a in wide)
    kind = args[0].dtype
    if name in ("add_rmsnorm", "add_layernorm"):
        total = rounded_sum(wide[0], wide[1], kind)
        norm = (
            rmsnorm(total, wide[2]) if name == "add_rmsnorm" else F.layer_norm(total, total.shape[-1:], *wide[2:], 1e-5)
        )
        return total, norm
    if name.endswith("__pair"):
        one = rotate_half if name.startswith("rope_half") else rope_complex
        return one(wide[0], *wide[2:]), one(wide[1], *wide[2:])
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "reduce": lambda x: x.sum(-1),
        "rmsnorm": rmsnorm,
        "layernorm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        "cross_entropy": F.cross_entropy,
        "gelu": F.gelu,
        "silu_mul": lambda gate, up: F.silu(gate) * up,
        "rotary_embedding": rotary,
        "rope_half": rotate_half,
        "rope_complex": rope_complex,
        "groupnorm": lambda x, w, b, g, e, silu=False: (F.silu if silu else lambda y: y)(F.group_norm(x, g, w, b, e)),
        "matmul": torch.matmul,
        "flash_attention": attention_by_hand,
        "fused_mlp": mlp,
        "linear_gelu": lambda x, w, b=None, approximate="none": F.gelu(F.linear(x, w, b), approximate=approximate),
    }[name.partition("__")[0]](*wide, **kwargs)


def complaint(out: Any, expected: torch.Tensor, kind: torch.dtype) -> str | None:
    if out.shape != expected.shape or out.dtype != kind:
        return f"{out.dtype} {tuple(out.shape)} instead of {kind} {tuple(expected.shape)}"
    expected = expected.to(kind).double() if not expected.isfinite().all() or kind == torch.float16 else expected
    finite = expected.isfinite()
    if not torch.equal(out.isnan(), expected.isnan()) or not torch.equal(
        out[~finite & ~out.isnan()].double(), expected[~finite & ~expected.isnan()]
    ):
        return f"non-finite values differ: {int((out.isnan() != expected.isnan()).sum())} of {out.numel()}"
    wrong, scale = (out.double() - expected)[finite], expected[finite]
    if scale.numel() == 0:
        return None
    error = float(wrong.norm() / scale.norm().clamp_min(1e-30))
    worst = float(wrong.abs().max() / scale.abs().max().clamp_min(1e-30))
    return f"relative error {error:.1e}, worst {worst:.1e}" if max(error, worst) > TOLERANCE[kind] else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def check_file(file: Path) -> list[str]:
    """Every complaint about one kernel file; a second call must repeat the first bit by bit and leave inputs alone."""
    torch.manual_seed(0)
    module, found = load(file), []
    for dtype in DTYPES:
        for label, args, kwargs in checks(file.stem, dtype):
            before = [a.clone() if torch.is_tensor(a) else a for a in args]
            try:
                first, second = module.kernel_fn(*args, **kwargs), module.kernel_fn(*args, **kwargs)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                found.append(f"{dtype} {label}: {type(error).__name__} {str(error)[:160]}")
                if "CUDA error" in str(error):
                    return found
                continue
            expected = truth(file.stem, args, kwargs)
            outs, again = (r if isinstance(r, tuple) else (r,) for r in (first, second))
            for out, repeat, wanted in zip(
                outs, again, expected if isinstance(expected, tuple) else (expected,), strict=True
            ):
                if problem := complaint(out, wanted, dtype):
                    found.append(f"{dtype} {label}: {problem}")
                if not same(out, repeat):
                    found.append(f"{dtype} {label}: two calls differ")
            for a, b in zip(args, before, strict=True):
                if torch.is_tensor(a) and not torch.equal(
                    torch.view_as_real(a) if a.is_complex() else a.nan_to_num(),
                    torch.view_as_real(b) if b.is_complex() else b.nan_to_num(),
                ):
                    found.append(f"{dtype} {label}: an input was changed")
    return found


def files() -> list[Path]:
    return sorted([*KERNELS.glob("triton/*.py"), *KERNELS.glob("cuda/*.py")])


def check_all(workers: int) -> None:
    """One process a file, so that their compilations run side by side."""

    def one(file: Path) -> tuple[Path, list[str]]:
        command = [sys.executable, __file__, "--check-file", file]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        except subprocess.TimeoutExpired:
            return file, ["no answer within 90 s"]
        lines = done.stdout.strip().splitlines()
        return file, json.loads(lines[-1]) if done.returncode == 0 else [done.stderr[-600:]]

    good = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for file, found in pool.map(one, files()):
            label = f"{file.parent.name}/{file.stem}"
            good += [] if found else [label]
            for line in found[:6]:
                print(f"WRONG {label}: {line}", flush=True)
    print(f"correct in every dtype and shape: {len(good)} of {len(files())}: {' '.join(good)}", flush=True)


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class Timed:
    """One case: `make` gives one input set, `moved` counts compulsory bytes (0: bound by arithmetic, see `flops`)."""

    name: str
    op: str
    make: Callable[[], tuple[Any, ...]]
    eager: Callable[..., Any]
    moved: int = 0
    flops: int = 0
    kwargs: dict[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ()


def cases(dtype: torch.dtype = torch.bfloat16) -> list[Timed]:
    def x(*shape):
        return lambda: (rand(*shape, dtype=dtype),)

    def normed(rows, width, inputs, weights):
        def make():
            return tuple(rand(rows, width, dtype=dtype) for _ in range(inputs)) + tuple(
                rand(width, dtype=dtype) for _ in range(weights)
            )

        return make

    def add_rms(x, residual, weight):
        total = x + residual
        return total, rmsnorm_as_models_have_it(total, weight)

    def half(q, k, cos, sin):
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin)

    def half_inputs():
        cos, sin = (t.repeat(1, 2)[None, None] for t in table(2048, 64, dtype))
        return rand(1, 32, 2048, 128, dtype=dtype), rand(1, 8, 2048, 128, dtype=dtype), cos, sin

    big, m = 8192 * 4096 * 2, 2**20
    return [
        Timed("softmax 8192x4096", "softmax", x(8192, 4096), lambda x: torch.softmax(x, -1), 2 * big),
        Timed("softmax 4096x50257", "softmax", x(4096, 50257), lambda x: torch.softmax(x, -1), 4096 * 50257 * 4),
        Timed("rmsnorm 8192x4096", "rmsnorm", normed(8192, 4096, 1, 1), rmsnorm_as_models_have_it, 2 * big),
        Timed("add+rmsnorm 8192x4096", "add_rmsnorm", normed(8192, 4096, 2, 1), add_rms, 4 * big),
        Timed("add+rmsnorm 2048x2048", "add_rmsnorm", normed(2048, 2048, 2, 1), add_rms, 32 * m),
        Timed(
            "layernorm 8192x4096", "layernorm", normed(8192, 4096, 1, 2),
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2 * big,
        ),
        Timed(
            "cross-entropy 4096x128256", "cross_entropy",
            lambda: (rand(4096, 128256, dtype=dtype), torch.randint(128256, (4096,), device=DEVICE)),
            F.cross_entropy, 4096 * 128256 * 2,
        ),
        Timed("sum 8192x4096", "reduce", x(8192, 4096), lambda x: x.sum(-1), big),
        Timed(
            "rope interleaved 2x32x2048x128", "rotary_embedding",
            lambda: (rand(2, 32, 2048, 128, dtype=dtype), *table(2048, 64, dtype)), rotary, 64 * m,
        ),
        Timed("rope half 32+8x2048x128", "rope_half", half_inputs, half, 40 * m, variants=("pair",)),
        Timed(
            "silu*up 4096x11008", "silu_mul",
            lambda: (rand(4096, 11008, dtype=dtype), rand(4096, 11008, dtype=dtype)),
            lambda gate, up: F.silu(gate) * up, 4096 * 11008 * 6,
        ),
        Timed("gelu 4096x3072", "gelu", x(4096, 3072), F.gelu, 48 * m),
        Timed(
            "groupnorm 16x256x64x64", "groupnorm",
            lambda: (rand(16, 256, 64, 64, dtype=dtype), rand(256, dtype=dtype), rand(256, dtype=dtype), 32),
            lambda x, w, b, g: F.group_norm(x, g, w, b), 64 * m,
        ),
        Timed(
            "matmul 4096", "matmul", lambda: (rand(4096, 4096, dtype=dtype), rand(4096, 4096, dtype=dtype)),
            torch.matmul, flops=2 * 4096**3,
        ),
        Timed(
            "attention 2x32x2048x128", "flash_attention",
            lambda: tuple(rand(2, 32, 2048, 128, dtype=dtype) for _ in range(3)), attention,
            flops=2 * 64 * 2048**2 * 128,
        ),
        Timed(
            "linear+gelu 4096x768x3072", "linear_gelu",
            lambda: (rand(4096, 768, dtype=dtype), rand(3072, 768, dtype=dtype, scale=0.04), rand(3072, dtype=dtype)),
            lambda x, w, b: F.gelu(F.linear(x, w, b)), flops=2 * 4096 * 768 * 3072,
        ),
        Timed(
            "fused mlp 2048x4096x11008", "fused_mlp",
            lambda: (
                rand(2048, 4096, dtype=dtype),
                *(rand(11008, 4096, dtype=dtype, scale=0.02) for _ in range(2)),
                rand(4096, 11008, dtype=dtype, scale=0.01),
            ),
            mlp, flops=6 * 2048 * 4096 * 11008,
        ),
    ]  # fmt: skip


def copy_rate() -> float:
    """Bytes read plus written per second of a 2 GB device copy, best of ten."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2 * source.numel() * 4 / best


def replay_us(call: Callable[..., Any], sets: list[tuple[Any, ...]], flush: torch.Tensor, replays: int = 15) -> float:
    """Median microseconds of one call, from graph replays of two rounds over the input sets, each after an L2 flush."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*args) for args in sets * 2]  # outputs stay apart, as in a model
    times = []
    for _ in range(replays):
        flush.sum()  # reads only: leaves no dirty lines to be written back during the measurement
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(sets)))
    del kept
    return statistics.median(times)


def sweep_of(case: Timed, backend: str, values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The tunables worth a product for one case, and their values: those that its path through the file reads."""
    long = "50257" in case.name
    names = {
        "cuda": ["THREADS", "UNROLL", "HEADS", "LOAD", "STAGED_THREADS", "STAGED_BLOCKS", "KEEP", "WAVES"],
        "triton": ["ELEMENTS_PER_THREAD", "BLOCK", "WARPS", "HEADS", "TILE", "ONLINE_BLOCK"],
    }[backend]
    if backend == "triton" and not case.moved:
        names = ["TILE", "DESCRIBED", "GATED_TILE", "DOWN_TILE", "DESCRIPTORS"]
    chosen = {name: values[name] for name in names if name in values}
    staged = {"STAGED_THREADS", "STAGED_BLOCKS", "KEEP", "ONLINE_BLOCK"}
    chosen = {name: v for name, v in chosen.items() if (name in staged) == long or case.op != "softmax"}
    if "norm" in case.op or case.op == "softmax":
        chosen.pop("UNROLL", None)
    if "norm" not in case.op and case.op != "softmax" and case.moved:  # the rest has been swept more widely before
        chosen = {name: v[:2] for name, v in chosen.items()}
    if "LOAD" in chosen:
        chosen["LOAD"] = [0] if long else [0, 1]
    if "WAVES" in chosen:
        chosen["WAVES"] = [0, 1] if case.op == "add_rmsnorm" else [0]
    return chosen


def candidates(case: Timed, tune: bool) -> list[tuple[str, Path, dict[str, Any]]]:
    """(backend, file, tunables) to time: the default of each file and, when tuning, the product of its tunables."""
    found = []
    for file in files():
        op, _, variant = file.stem.partition("__")
        if op != case.op or (variant in ("pair",)) != bool(case.variants):
            continue
        found.append((file.parent.name, file, {}))
        if not tune:
            continue
        values = tunables(file)
        found += [(file.parent.name, file, {"PDL": 0})] if "PDL" in values else []
        wanted = sweep_of(case, file.parent.name, values)
        grid = [dict(zip(wanted, choice, strict=True)) for choice in itertools.product(*wanted.values())]
        if not case.moved:  # slow to compile: one tunable at a time
            grid = [{name: value} for name in wanted for value in wanted[name]]
        current = {name: values[name][0] for name in wanted}
        found += [
            (file.parent.name, file, choice) for choice in grid if choice and not choice.items() <= current.items()
        ]
    return found


def build_all(plan: list[tuple[str, Path, dict[str, Any]]], dtype: torch.dtype, workers: int) -> None:
    """Compile the CUDA files of the plan side by side; loading them later finds the libraries."""
    capability = torch.cuda.get_device_capability()
    modules = [load(file, choice) for backend, file, choice in plan if backend == "cuda"]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda module: module.library(dtype, capability), modules))


def compile_case(case: Timed, flush: torch.Tensor) -> str:
    torch.compiler.reset()
    sets = [case.make() for _ in range(SETS)]
    us = replay_us(torch.compile(case.eager), sets, flush, 7)
    torch.cuda.empty_cache()
    return f"{case.name} {us:.1f}"


def copies(flush: torch.Tensor) -> str:
    """What a plain device copy of the cases' sizes takes under the same protocol, and its share of the bound rate."""
    found = []
    for mib in (32, 40, 48, 64, 128):
        sets = [(torch.randn(mib * 2**17, device=DEVICE),) for _ in range(SETS)]  # half is read, half written
        found.append(f"{mib} MiB {replay_us(torch.clone, sets, flush):.1f}")
    return "copies by clone, us: " + ", ".join(found)


def time_case(case: Timed, options: argparse.Namespace, rate: float, flush: torch.Tensor, deadline: float) -> str:
    sets = [case.make() for _ in range(SETS)]
    replays = 7 if case.moved > 4e8 else 15
    eager = replay_us(case.eager, sets, flush, replays)
    results: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for backend, file, choice in candidates(case, options.tune):
        if time.monotonic() > deadline:
            break
        try:
            module = load(file, choice)
            us = replay_us(lambda *args, m=module: m.kernel_fn(*args, **case.kwargs), sets, flush, replays)
        except Exception as error:  # noqa: BLE001 - a sweep goes on when one choice does not fit the device
            print(f"{file.stem} {choice}: {type(error).__name__} {str(error)[:120]}", flush=True)
            continue
        label = backend + (f"/{file.stem.partition('__')[2]}" if "__" in file.stem and not case.variants else "")
        results.setdefault(label, []).append((us, choice))
    bound = case.moved / rate * 1e6
    line = f"{case.name:31s} eager {eager:7.1f} "
    if bound:
        line += f"bound {bound:6.1f} "
    else:
        line += f"eager TFLOP/s {case.flops / eager / 1e6:5.0f} "
    for label, times in results.items():
        best, choice = min(times, key=lambda pair: pair[0])
        line += f"| {label} {times[0][0]:6.1f}"
        line += f" ({bound / times[0][0]:4.0%}) " if bound else f" ({case.flops / times[0][0] / 1e6:.0f}T) "
        if len(times) > 1:
            line += f"best {best:6.1f}" + (f" ({bound / best:4.0%})" if bound else "") + f" {choice} "
        for us, other in times:
            if other == {"PDL": 0}:
                line += f"noPDL {us:.1f} "
        if options.log:
            with Path(options.log).open("a") as log:
                for us, other in sorted(times, key=lambda pair: pair[0]):
                    log.write(
                        json.dumps({"case": case.name, "kernel": label, "us": round(us, 2), "choice": other}) + "\n"
                    )
    return line


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("check", "time", "tune", "compile"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--check-file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--log", default="")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=190)
    options = parser.parse_args()
    if options.check_file:
        print(json.dumps(check_file(options.check_file)))
        return
    deadline = time.monotonic() + options.seconds
    if options.check:
        check_all(options.workers)
        print(f"checked after {options.seconds - deadline + time.monotonic():.0f} s", flush=True)
    if not options.time:
        return
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s", flush=True)
    flush = torch.zeros(2**26, device=DEVICE)
    todo = [case for case in cases() if options.only in case.name]
    plan = [item for case in todo for item in candidates(case, options.tune)]
    build_all(plan, torch.bfloat16, options.workers)
    print(f"{len(plan)} candidates built after {options.seconds - deadline + time.monotonic():.0f} s", flush=True)
    lines = [copies(flush)]
    for case in todo:
        if time.monotonic() > deadline:
            lines.append(f"{case.name}: out of time")
            continue
        lines.append(time_case(case, options, rate, flush, deadline))
        print(f"{case.name} after {options.seconds - deadline + time.monotonic():.0f} s", flush=True)
        torch.cuda.empty_cache()
    compiled = [compile_case(case, flush) for case in todo if options.compile and time.monotonic() < deadline]
    print("\n".join(lines))
    print("torch.compile, us:", ", ".join(compiled))


if __name__ == "__main__":
    main()

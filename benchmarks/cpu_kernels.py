"""Times the C++ kernels against eager and torch.compile: interleaved A B B A in a process, repeated in fresh processes.

Figures are ratios, reference time ÷ kernel time, so above 1 the kernel is faster; a process gives the median over its
rounds, the table the median and the range over processes. The compiled reference is called directly, without Dynamo's
guards. On a machine that others use, count processor time of one thread instead of the wall clock:

    python benchmarks/cpu_kernels.py                                 # all cases, wall clock, all threads
    python benchmarks/cpu_kernels.py --clock cpu --threads 1 softmax gelu
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "cpp"
ROUND_SECONDS = 4e-3  # one A or B of A B B A lasts about this long
INPUT_SETS = 3
QUIET_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}  # no heap trimming

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A kernel file, what it replaces, its inputs, and keywords that choose a form of it."""

    kernel: str
    reference: Function
    inputs: Callable[[], tuple[Any, ...]]
    keywords: dict[str, Any]


def cases() -> dict[str, Case]:
    """Named ops at the sizes of the contract, model regions at sizes of the example models."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - the name everybody uses

    def rmsnorm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def rotary(x: Any, cos: Any, sin: Any) -> Any:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def rope_half(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def rope_complex(x: Any, rotations: Any) -> Any:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def add_rmsnorm(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        return total, rmsnorm(total, weight)

    def add_layernorm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        total = x + residual
        return total, F.layer_norm(total, total.shape[-1:], weight, bias)

    def gelu_tanh(x: Any) -> Any:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def written_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask, -1) @ v

    def loss(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits, targets)

    def kernel_case(kernel: str, reference: Function, *shapes: tuple[int, ...], **keywords: Any) -> Case:
        return Case(kernel, reference, lambda: tuple(torch.randn(shape) for shape in shapes), keywords)

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    wide, narrow, row = (1024, 2048), (512, 1024), (1024,)
    heads, table = (1, 8, 512, 64), (512, 32)
    made = {
        "softmax": kernel_case("softmax", lambda x: torch.softmax(x, -1), wide),
        "reduce": kernel_case("reduce", lambda x: x.sum(-1), wide),
        "layernorm": kernel_case("layernorm", norm, wide, (2048,), (2048,)),
        "rmsnorm": kernel_case("rmsnorm", rmsnorm, wide, (2048,)),
        "matmul": kernel_case("matmul", lambda a, b: a @ b, (512, 512), (512, 512)),
        "flash_attention": kernel_case("flash_attention", attention, *[(1, 8, 256, 64)] * 3),
        "fused_mlp": kernel_case("fused_mlp", mlp, (128, 512), (1376, 512), (1376, 512), (512, 1376)),
        "rotary_embedding": kernel_case("rotary_embedding", rotary, heads, table, table),
        "add_rmsnorm": kernel_case("add_rmsnorm", add_rmsnorm, narrow, narrow, row),
        "add_layernorm": kernel_case("add_layernorm", add_layernorm, narrow, narrow, row, row),
        "gelu": kernel_case("gelu", F.gelu, narrow),
        "gelu_tanh": kernel_case("gelu", gelu_tanh, narrow, approximate="tanh"),
        "silu_mul": kernel_case("silu_mul", lambda gate, up: F.silu(gate) * up, narrow, narrow),
        "rope_half": kernel_case("rope_half", rope_half, heads, (512, 64), (512, 64)),
        "groupnorm": kernel_case("groupnorm", lambda x, w, b: F.group_norm(x, 32, w, b), (2, 64, 32, 32), (64,), (64,)),
    }
    made["cross_entropy"] = Case(
        "cross_entropy",
        loss,
        lambda: (torch.randn(512, 8192), torch.randint(0, 8192, (512,))),
        {},
    )
    made["rope_complex"] = Case(
        "rope_complex",
        rope_complex,
        lambda: (torch.randn(1, 512, 8, 32), torch.polar(torch.ones(512, 16), torch.randn(512, 16))),
        {},
    )
    made["written_attention"] = Case(
        "flash_attention",
        written_attention,
        lambda: (*(torch.randn(1, 8, 512, 64) for _ in range(3)), torch.full((512, 512), -math.inf).triu(1)),
        {"causal": False},
    )
    return made


def kernel_of(case: Case) -> Function:
    """The kernel file's function, taking the reference's arguments."""
    spec = importlib.util.spec_from_file_location(f"cpp_{case.kernel}", KERNELS / f"{case.kernel}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if case.keywords == {"causal": False}:  # the mask is a keyword of the attention kernel
        return lambda q, k, v, mask: module.kernel_fn(q, k, v, causal=False, mask=mask)
    if case.keywords:
        return lambda *inputs: module.kernel_fn(*inputs, **case.keywords)
    function: Function = module.kernel_fn
    return function


def compiled(reference: Function, inputs: tuple[Any, ...]) -> Function:
    """The Inductor artefact of `reference`, in its argument order, without Dynamo around it."""
    import torch
    from torch._inductor.compile_fx import compile_fx

    found: list[tuple[Function, list[str]]] = []

    def backend(graph: Any, examples: Any) -> Function:
        names = [node.target.strip("Ll").strip("_") for node in graph.graph.nodes if node.op == "placeholder"]
        found.append((compile_fx(graph, examples), names))
        return found[-1][0]

    torch.compile(reference, backend=backend, dynamic=False)(*inputs)
    ((artefact, names),) = found
    arguments = (
        reference.__code__.co_varnames[: reference.__code__.co_argcount] if hasattr(reference, "__code__") else ()
    )
    if not arguments or list(arguments) == names:
        return artefact
    order = [arguments.index(name) for name in names]
    return lambda *inputs: artefact(*(inputs[index] for index in order))


def measure(name: str, clock: Callable[[], float], rounds: int) -> dict[str, float]:
    """Median log-ratio of each reference against the kernel in this process, and the kernel's own µs."""
    import torch

    case = cases()[name]
    sets = [case.inputs() for _ in range(INPUT_SETS)]
    kernel = kernel_of(case)
    rivals = {"eager": case.reference, "compile": compiled(case.reference, sets[0])}
    for function in (kernel, *rivals.values()):
        for inputs in sets:
            function(*inputs)
    calls = max(1, round(ROUND_SECONDS / _seconds(kernel, sets, 2, time.perf_counter)))
    ratios: dict[str, list[float]] = {rival: [] for rival in rivals}
    own: list[float] = []
    with torch.inference_mode():
        for _ in range(rounds):
            for rival, function in rivals.items():
                first, other = _seconds(kernel, sets, calls, clock), _seconds(function, sets, calls, clock)
                other, first = (
                    other + _seconds(function, sets, calls, clock),
                    first + _seconds(kernel, sets, calls, clock),
                )
                ratios[rival].append(math.log(other / first))
                own.append(first / 2 * 1e6)
    return {"kernel_us": statistics.median(own)} | {rival: statistics.median(logs) for rival, logs in ratios.items()}


def _seconds(function: Function, sets: list[tuple[Any, ...]], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for index in range(calls):
        function(*sets[index % len(sets)])
    return (clock() - start) / calls


def in_fresh_process(options: argparse.Namespace, cache: str) -> dict[str, dict[str, float]]:
    """`measure` of all cases in a process of its own; raises CalledProcessError when it fails.

    `cache` is Inductor's: a folder of ours, because its entries do not say for which vector width they were written.
    """
    command = [sys.executable, __file__, "--child", "--clock", options.clock, "--rounds", str(options.rounds)]
    environment = {**os.environ, **QUIET_MALLOC, "TORCHINDUCTOR_CACHE_DIR": cache}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    result = subprocess.run([*command, *options.names], stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, dict[str, float]] = json.loads(result.stdout.splitlines()[-1])
    return found


def _said(logs: list[float]) -> str:
    low, middle, high = (math.exp(value) for value in (min(logs), statistics.median(logs), max(logs)))
    return f"{middle:6.2f} ({low:.2f}-{high:.2f})"


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all without any")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12, help="A B B A rounds per process")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS; 0 leaves it alone")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time of the process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = options.names or list(cases())
    if options.child:
        clock = time.process_time if options.clock == "cpu" else time.perf_counter
        print(json.dumps({name: measure(name, clock, options.rounds) for name in options.names}))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        runs = [in_fresh_process(options, cache) for _ in range(options.processes)]
    print(f"{options.processes} processes, {options.rounds} rounds each, {options.clock} clock; ratio (range)")
    print(f"{'case':18s} {'kernel µs':>10s}  {'eager ÷ ours':>20s}  {'compile ÷ ours':>20s}")
    for name in options.names:
        own = statistics.median(run[name]["kernel_us"] for run in runs)
        columns = "  ".join(f"{_said([run[name][rival] for run in runs]):>20s}" for rival in ("eager", "compile"))
        print(f"{name:18s} {own:10.1f}  {columns}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Times what the playbook proposes for the light regions of an example model against eager and torch.compile.

    python benchmarks/fuser.py models/llama.py:LLaMA [--rounds 60] [--kind rmsnorm]

CPU only. Candidates are interleaved with the originals in every round and the best round counts (other work on the
machine only ever adds time); the compiled region is Inductor's artefact called directly, without Dynamo's guards.
Prints microseconds of the candidate and how many times slower the originals are. Sees one process and one layout of
memory: the judge, not this table, decides what is kept.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent.proposers.playbook.playbook import kernels_folder, structures  # noqa: E402
from agent.records import Brief  # noqa: E402
from harness.capture import capture  # noqa: E402
from harness.loading import load_model  # noqa: E402
from harness.records import ModelSpec, Target  # noqa: E402
from harness.targets import draft_targets, finish, observe  # noqa: E402

HEAVY = {"linear", "matmul", "conv", "embedding"}
Call = Callable[[], Any]


def targets_of(model: str) -> list[tuple[Target, tuple[torch.Tensor, ...]]]:
    """The model's targets with their first captured inputs."""
    path, _, name = model.partition(":")
    found = capture(load_model(ModelSpec(reference=f"{Path(path).resolve()}:{name}", device="cpu")))
    drafts = draft_targets(found)
    observe(found, drafts)
    return [(finish(draft, {}), draft.samples[0]) for draft in drafts if draft.samples]


def loaded(source: str) -> Callable[..., Any]:
    """The file's `kernel_fn`."""
    path = Path(tempfile.mkdtemp()) / "candidate.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel_fn


def compiled(reference: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Call:
    """Inductor's artefact for the region, called directly."""
    from torch._inductor.compile_fx import compile_fx

    kept: list[tuple[Callable[..., Any], list[torch.Tensor]]] = []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        artefact = compile_fx(module, examples)

        def keep(*arguments: torch.Tensor) -> Any:
            kept.append((artefact, list(arguments)))
            return artefact(*arguments)

        return keep

    torch._dynamo.reset()  # noqa: SLF001 - the public way to start afresh
    torch.compile(reference, backend=backend, dynamic=False)(*inputs)
    artefact, arguments = kept[-1]
    return lambda: artefact(*arguments)


def best_us(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The best of `rounds` interleaved rounds, microseconds per call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            call()
            best[name] = min(best[name], (time.perf_counter() - started) / 2 * 1e6)
    return best


def bind(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], constants: dict[str, Any]) -> Call:
    """A call without arguments."""
    return lambda: function(*inputs, **constants)


def measure(target: Target, inputs: tuple[torch.Tensor, ...], rounds: int) -> None:
    """One line per candidate of a target."""
    scope: dict[str, Any] = {}
    exec(target.reference, scope)
    reference, constants = scope["reference"], dict(target.constants)
    calls = {"eager": bind(reference, inputs, constants), "compile": compiled(reference, inputs)}
    brief = Brief(target, "cpu", "", {}, None, None, (), "")
    for idea in structures(brief, kernels_folder(), []):
        calls[idea.tactic] = bind(loaded(idea.source), inputs, constants)
        calls[idea.tactic]()
    times = best_us(calls, rounds)
    for name, value in times.items():
        if name not in ("eager", "compile"):
            ratios = f"{times['eager'] / value:6.2f} {times['compile'] / value:8.2f}"
            print(f"{target.id:24} {name:30} {value:9.1f} {ratios}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kind", help="only targets of this kind")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, best of {options.rounds} rounds")
    print(f"{'target':24} {'candidate':30} {'us':>9} {'eager':>6} {'compile':>8}")
    with torch.no_grad():
        for target, inputs in targets_of(options.model):
            if target.kind not in HEAVY and options.kind in (None, target.kind):
                measure(target, inputs, options.rounds)


if __name__ == "__main__":
    main()

"""Takes a zoo of small models through capture, ranking, splicing and comparison, and writes benchmarks/ZOO.md.

For each model: TorchDynamo's graphs are taken apart, every region becomes a target, and each light or attention target
gets its own reference back as a kept kernel, through the same door as a real one. What is proven is that the model
with these kernels computes what eager does, on two consecutive calls with different inputs and at a second size, and
how much of the time of light operations lies in regions that a kernel can replace. Times are eager, one thread, the
fastest of several runs of each operation: good for shares, not for speed.

    python benchmarks/zoo.py                     # all models, writes benchmarks/ZOO.md
    python benchmarks/zoo.py LLaMA T5 Dropout    # some models, prints their rows
"""

import argparse
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zoo_cases
import zoo_handwritten

TABLE = Path(__file__).with_name("ZOO.md")
TIMED_RUNS = 5
SMALL_SHARE = 0.005  # uncovered parts below this share of the light time are summed up
ALLOWED_SECONDS = 600
SECOND_SIZE_SECONDS = 180


@dataclass
class Row:
    """What came of one model."""

    name: str
    group: str
    graphs: int = 0
    sizes: int = 0
    targets: int = 0
    sites: int = 0
    spliced: int = 0
    covered: float = 0.0  # of the time of light operations
    ranking: str = ""
    uncovered: list[tuple[float, str]] = field(default_factory=list)
    verified: bool = False
    max_error: float = 0.0
    other_size: str = ""
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A model of the zoo; `make` needs torch, and transformers where it is one of theirs."""

    name: str
    group: str
    make: Callable[[], Any]
    trained: bool = False


def cases() -> list[Case]:
    """All of them: transformers first."""
    theirs = [Case(each.name, "transformers", partial(zoo_cases.build, each)) for each in zoo_cases.ARCHITECTURES]
    own = [
        Case(kind.__name__, "hand-written", kind, bool(getattr(kind, "trained", False)))
        for kind in zoo_handwritten.MODELS
    ]
    return [*theirs, *own]


def run(case: Case, *, second_size: bool = True) -> Row:
    """One model from its class to its comparison with eager, at a second size too unless told otherwise."""
    import torch

    from harness import targets
    from harness.capture import capture

    started = time.perf_counter()
    row = Row(case.name, case.group)
    loaded = _loaded(case)
    found = capture(loaded)
    drafts = targets.draft_targets(found)
    targets.observe(found, drafts)
    row.graphs, row.sizes, row.targets = len(found.graphs), len(found.sizes), len(drafts)
    row.sites = sum(len(draft.sites) for draft in drafts)
    with torch.no_grad():
        spent = _node_times(found)
        applied = _spliced(row, loaded, found, drafts, second_size=second_size)
    _account(row, found, drafts, spent, applied)
    row.seconds = time.perf_counter() - started
    return row


def _loaded(case: Case) -> Any:
    import torch

    from harness.derived_inputs import derive_inputs
    from harness.example_inputs import given_inputs
    from harness.loading import LoadedModel

    torch.manual_seed(0)
    device, dtype = torch.device("cpu"), torch.float32
    model = case.make().train(case.trained).requires_grad_(requires_grad=False)
    if case.group == "hand-written":
        inputs = given_inputs(model.example_inputs, case.name, device, dtype)[0]
    else:
        inputs = derive_inputs(model, device, dtype)
    loaded = LoadedModel(model, inputs.args, inputs.kwargs, case.name, "cpu", dtype)
    loaded()  # as `load_model` does: what a first call sets up is no part of the graph
    return loaded


def _node_times(found: Any) -> dict[Any, float]:
    """Seconds of every node of every graph on its first call's inputs, the fastest of several runs."""
    from torch.fx import Interpreter

    best: dict[Any, float] = {}

    class Clock(Interpreter):
        def run_node(self, n: Any) -> Any:
            start = time.perf_counter()
            value = super().run_node(n)
            best[n] = min(best.get(n, float("inf")), time.perf_counter() - start)
            return value

    from harness.targets import unchanged

    for graph in found.graphs:
        for _ in range(TIMED_RUNS if graph.calls else 0):
            with unchanged(graph, graph.calls[0]):
                Clock(graph.module).run(*graph.calls[0])
    return best


def _spliced(
    row: Row, loaded: Any, found: Any, drafts: Sequence[Any], *, second_size: bool
) -> Mapping[str, tuple[int, int, str]]:
    """Splice, compare; per target: sites that run the kernel, sites that fell back, and why."""
    from harness import targets
    from harness.capture import own_size, resized
    from harness.kernel_op import Kernel
    from harness.optimized import optimize
    from harness.partition import Family
    from harness.soundness import check, eager_randomness

    calls = {number: max(1, len(graph.calls)) for number, graph in enumerate(found.graphs)}
    chosen = [draft for draft in drafts if not draft.mismatch and draft.region.family is not Family.HEAVY]
    kept = [_as_kernel(Kernel, targets.finish(draft, calls)) for draft in chosen]
    ours = optimize(loaded.model, kept, under_compile=False)
    inputs = (loaded.args, loaded.kwargs)
    with eager_randomness(loaded.model, inputs):
        difference = check(ours, loaded.model, inputs)
        log = ours.sites
        sites = {
            draft.id: (log.applied.get(draft.id, 0), log.fallback.get(draft.id, 0), _reason(draft.id, log.reasons))
            for draft in chosen
        }
        row.spliced = sum(log.applied.values())
        row.verified, row.max_error, row.problem = difference.ok, difference.max_error, difference.detail
        if second_size and difference.ok and len(found.sizes) > 1:
            own, size = own_size(*inputs), found.sizes[1]
            row.other_size = f"{size.batch}×{size.length}" if size.length else f"{size.batch}"  # noqa: RUF001
            try:
                with _no_longer_than(SECOND_SIZE_SECONDS):
                    other = check(ours, loaded.model, resized(inputs, own, size))
                row.verified, row.max_error = other.ok, max(row.max_error, other.max_error)
                row.problem = row.problem or other.detail
            except Exception as error:  # Inductor wraps the one that rings
                if "TimeoutError" not in f"{type(error).__name__}: {error}":
                    raise
                row.other_size = f"not compiled within {SECOND_SIZE_SECONDS} s"
    return sites


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so long: torch's symbolic shapes can take minutes over one graph."""

    def ring(_signal: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    left = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(left)


def _as_kernel(make: Any, target: Any) -> Any:
    return make(target, target.reference.replace("def reference(", "def kernel_fn(", 1))


def _reason(target: str, reasons: Sequence[str]) -> str:
    return next((line.partition(": ")[2] for line in reasons if line.startswith(f"{target}: ")), "not found again")


def _account(
    row: Row, found: Any, drafts: Sequence[Any], spent: Mapping[Any, float], applied: Mapping[str, tuple[int, int, str]]
) -> None:
    """Divide the light time into covered and not, and rank the targets."""
    from harness.partition import Family

    light = covered = 0.0
    shares: dict[str, float] = {}
    missed: dict[str, float] = {}

    def miss(seconds: float, reason: str) -> None:
        missed[reason] = missed.get(reason, 0.0) + seconds

    for draft in drafts:
        for _, region in draft.sites:
            seconds = sum(spent.get(node, 0.0) for node in region.nodes)
            shares[draft.kind] = shares.get(draft.kind, 0.0) + seconds
            if draft.region.family is not Family.LIGHT:
                continue
            light += seconds
            ran, fell, reason = applied.get(draft.id, (0, 0, ""))
            part = ran / (ran + fell) if ran + fell else 0.0
            covered += seconds * part
            if part < 1:
                miss(seconds * (1 - part), f"{draft.kind}: {draft.mismatch or reason}")
    for graph in found.graphs:
        for left in graph.left_out:
            if any(node in graph.facts.heavy for node in left.nodes):
                continue
            opaque = next((graph.facts.foreign[node] for node in left.nodes if node in graph.facts.foreign), "")
            if opaque:  # what another library's operator does is not known to be light
                shares[opaque] = shares.get(opaque, 0.0) + sum(spent.get(node, 0.0) for node in left.nodes)
                continue
            seconds = sum(spent.get(node, 0.0) for node in left.nodes)
            light += seconds
            miss(seconds, f"{_named(left.nodes)}: {left.reason}")
    whole = sum(spent.values())
    row.covered = covered / light if light else 1.0
    ranked = sorted(shares.items(), key=lambda item: -item[1])[:4]
    row.ranking = ", ".join(f"{kind} {seconds / whole:.0%}" for kind, seconds in ranked)
    row.uncovered = sorted(((seconds / light, reason) for reason, seconds in missed.items()), reverse=True)


def _named(nodes: Sequence[Any]) -> str:
    from harness.reference import canonical_op

    names = list(dict.fromkeys(canonical_op(node) for node in nodes))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def isolated(case: Case, seconds: int) -> Row:
    """`run` in a process of its own, so that nothing one model leaves behind can reach the next."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(asdict(_guarded(case, seconds)), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Row(case.name, case.group, problem=f"the process ended without an answer (more than {seconds} s?)")
    return Row(**json.loads(text))


def _guarded(case: Case, seconds: int) -> Row:
    import torch

    signal.alarm(seconds)
    torch.set_num_threads(1)
    try:
        return run(case)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is a row of the table
        first = next(iter(str(error).strip().splitlines()), "")
        return Row(case.name, case.group, problem=f"{type(error).__name__}: {first}"[:300])


def prepare() -> None:
    """Imports what every model needs, once, before the first fork, and keeps compilers in their own process."""
    import logging

    import torch._dynamo
    import torch._inductor.config
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch._inductor.config.compile_threads = 1  # noqa: SLF001 - no pool of compilers in a forked process


def table(rows: Sequence[Row]) -> str:
    """The whole document."""
    import torch
    import transformers

    good = [row for row in rows if row.verified]
    well = [row for row in good if row.covered >= 0.8]
    good_sentence = f"{len(good)} captured, ranked, spliced and equal to eager"
    summary = (
        f"{len(rows)} models ({sum(row.group == 'transformers' for row in rows)} architectures of transformers "
        f"{transformers.__version__}, the others hand-written); {good_sentence}; in {len(well)} of these at least 80% "
        "of the light time is covered by spliced regions, elsewhere each part that is not has its reason below. "
        f"torch {torch.__version__}, CPU, {time.strftime('%Y-%m-%d', time.gmtime())}. Made by "
        "`python benchmarks/zoo.py`."
    )
    explained = (
        "Sites are call sites of targets; spliced are those that ran a kept kernel (heavy operations stay with the "
        "library). The second size is batch×length."  # noqa: RUF001
    )
    about = (__doc__ or "").strip().split("\n\n")[1]
    lines = ["# The zoo", "", about, "", summary, "", explained, ""]
    for group in ("transformers", "hand-written"):
        lines += [f"## {group.capitalize()}", "", *_group(row for row in rows if row.group == group), ""]
    return "\n".join([*lines, *_explanations(rows)]) + "\n"


def _group(rows: Iterator[Row]) -> Iterator[str]:
    titles = ("model", "graphs", "sizes", "targets", "sites", "spliced", "light time covered", "equal to eager")
    yield f"| {' | '.join([*titles, 'second size', 'most time in'])} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        equal = f"yes, {row.max_error:.1e}" if row.verified else "**no**"
        yield (
            f"| {row.name} | {row.graphs} | {row.sizes} | {row.targets} | {row.sites} | {row.spliced} | "
            f"{row.covered:.0%} | {equal} | {row.other_size or '–'} | {row.ranking} |"  # noqa: RUF001
        )


def _explanations(rows: Sequence[Row]) -> Iterator[str]:
    yield "## What is not covered, and why"
    yield ""
    yield (
        "Shares are of the time of light operations; smaller parts than 0.5% are left out. Constant tables are masks, "
        "positions and slopes made from sizes alone: with 64 channels and 128 places they weigh far more than in a "
        "model of a real size."
    )
    yield ""
    for row in rows:
        parts = [f"{share:.1%} {reason}" for share, reason in row.uncovered if share >= SMALL_SHARE]
        said = [*([row.problem] if row.problem else []), *parts]
        if said:
            yield f"- **{row.name}**: {'; '.join(said)}"


def _rows(chosen: Sequence[Case], finished: Path | None, seconds: int) -> Iterator[Row]:
    """Run the models one after the other, or take their rows from the file of finished ones."""
    lines = finished.read_text(encoding="utf-8").splitlines() if finished and finished.is_file() else []
    done = {row.name: row for row in (Row(**json.loads(line)) for line in lines)}
    for case in chosen:
        row = done.get(case.name) or isolated(case, seconds)
        if finished and case.name not in done:
            with finished.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        print(
            f"{row.name}: {'equal' if row.verified else 'NOT EQUAL'}, {row.covered:.0%} covered, "
            f"{row.spliced}/{row.sites} spliced, {row.seconds:.0f} s {row.problem}",
            flush=True,
        )
        yield row


def main() -> int:
    """Run the chosen models, or all and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=int, default=ALLOWED_SECONDS, help="for one model")
    parser.add_argument("--rows", type=Path, help="file of finished rows, to go on after an interruption")
    options = parser.parse_args()
    known = {case.name: case for case in cases()}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no model {unknown[0]!r} in the zoo; there are {', '.join(known)}")
    prepare()
    rows = list(_rows([known[name] for name in options.names] or list(known.values()), options.rows, options.seconds))
    if options.names:
        print("\n".join([*_group(iter(rows)), "", *_explanations(rows)]))
    else:
        TABLE.write_text(table(rows), encoding="utf-8")
    return 0 if all(row.verified for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

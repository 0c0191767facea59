"""Experiments of one or many sessions as a Parquet file with a dataset card, for others to learn from.

Every text goes through `agent.redaction` before it is written: keys and tokens, the user's own paths and name do not
leave the machine. Prompts and replies are only in it when asked for.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import MachineError
from agent.journal import Journal
from agent.places import SessionPlaces
from agent.records import Experiment
from agent.session import read_options
from harness import wire
from harness.records import Target

TEXT, NUMBER, COUNT, FLAG = "string", "float64", "int64", "bool_"
COLUMNS: Mapping[str, tuple[str, str]] = {
    "session": (TEXT, "name of the session"),
    "experiment": (COUNT, "its number there"),
    "model": (TEXT, "the model that was being optimised"),
    "target": (TEXT, "the region of it that a kernel was to replace"),
    "target_kind": (TEXT, "its kind, such as rmsnorm or linear"),
    "target_title": (TEXT, "the region for people, with its call sites"),
    "reference": (TEXT, "Python source of the original"),
    "target_json": (TEXT, "inputs, constants, outputs, verified sizes and operations, as JSON"),
    "kernel": (TEXT, "source of the candidate; empty for an invalid reply"),
    "backend": (TEXT, "triton, cuda, cpp or library"),
    "proposer": (TEXT, "who proposed it"),
    "tactic": (TEXT, "which idea it followed"),
    "description": (TEXT, "the proposer's words"),
    "status": (TEXT, "how it ended, the `status` of results.tsv"),
    "accepted": (FLAG, "whether all five stages passed and no guard fired; null without a verdict"),
    "failed_stage": (TEXT, "the stage that refused it"),
    "guard": (TEXT, "the guard that fired"),
    "detail": (TEXT, "the judge's or the session's sentence"),
    "eager_us": (NUMBER, "PyTorch eager, µs per call"),
    "incumbent_us": (NUMBER, "what it had to beat, µs per call"),
    "candidate_us": (NUMBER, "the candidate, µs per call"),
    "speedup_vs_pytorch": (NUMBER, "eager ÷ candidate"),
    "speedup_vs_best": (NUMBER, "incumbent ÷ candidate"),
    "ci_low": (NUMBER, "95% interval of speedup_vs_best, clustered by process"),
    "ci_high": (NUMBER, "its other end"),
    "noise": (NUMBER, "relative noise between identical kernels on that machine"),
    "model_ms": (NUMBER, "the whole model with it, ms, when it was measured"),
    "model_speedup": (NUMBER, "best other mode ÷ that"),
    "share": (NUMBER, "the target's share of the model's time before"),
    "time_us": (NUMBER, "the original's time in the deployed model, µs per call"),
    "floor_us": (NUMBER, "its roofline floor on that device, µs per call"),
    "verdict_json": (TEXT, "the whole verdict, with each measurement, as JSON"),
    "device": (TEXT, "the device's name"),
    "torch": (TEXT, "version"),
    "triton": (TEXT, "version"),
    "driver": (TEXT, "version"),
    "tokens": (COUNT, "what the proposal took"),
    "cost_usd": (NUMBER, "what the proposal cost; null where nobody knows"),
    "finished_at": (TEXT, "UTC"),
}
PROMPTS: Mapping[str, tuple[str, str]] = {
    "prompt": (TEXT, "what the proposer was asked"),
    "reply": (TEXT, "its whole answer"),
}


@dataclass(frozen=True)
class Source:
    """One session's experiments as rows, its profile and its machine in them."""

    name: str
    rows: tuple[Mapping[str, Any], ...]


def read_session(places: SessionPlaces, clean: Callable[[str], str], *, prompts: bool) -> Source:
    """All decided experiments of a session; texts are passed through `clean`."""
    profile = places.read_profile()
    targets = {target.id: target for target in profile.targets} if profile else {}
    with closing(Journal(places.journal, read_only=True)) as journal:
        machine: Mapping[str, str] = wire.from_json(dict, journal.note("fingerprint") or "{}")
        shared = {
            "session": places.name,
            "model": read_options(journal).model.reference.rpartition("/")[2],
            "device": profile.device_name if profile else machine.get("device"),
            **{name: machine.get(name) for name in ("torch", "triton", "driver")},
        }
        done = [one for one in journal.experiments() if one.status is not None]
        rows = [{**shared, **_row(one, journal, targets.get(one.target), prompts=prompts)} for one in done]
    return Source(places.name, tuple({key: _cleaned(value, clean) for key, value in row.items()} for row in rows))


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    return clean(value) if isinstance(value, str) else value


def _row(one: Experiment, journal: Journal, target: Target | None, *, prompts: bool) -> dict[str, Any]:
    candidate, verdict = one.candidate, one.verdict
    invalid = journal.invalid_reply(one.number)
    source = candidate or invalid
    timing = wire.to_data(verdict.timing) if verdict and verdict.timing else {}
    row = {
        "experiment": one.number,
        "target": one.target,
        "kernel": candidate.source if candidate else "",
        "backend": candidate.backend if candidate else None,
        "tactic": candidate.tactic if candidate else None,
        "description": candidate.description if candidate else None,
        "proposer": source.proposer if source else None,
        "tokens": source.usage.tokens if source else None,
        "cost_usd": source.usage.cost_usd if source else None,
        "status": str(one.status),
        "accepted": verdict.accepted if verdict else None,
        "failed_stage": verdict.stage if verdict else None,
        "guard": verdict.guard if verdict else None,
        "detail": one.detail or (verdict.detail if verdict else invalid.reason if invalid else ""),
        "verdict_json": wire.to_json(verdict) if verdict else None,
        "model_ms": one.model_ms,
        "model_speedup": one.model_speedup,
        "finished_at": one.finished_at,
        **{name: timing.get(name) for name in COLUMNS if name in timing},
    }
    if prompts:
        row |= {"prompt": source.prompt if source else None, "reply": source.reply if source else None}
    return row | (_about(target) if target else {})


def _about(target: Target) -> dict[str, Any]:
    data = wire.to_data(target)
    wanted = ("inputs", "constants", "outputs", "bindings", "graph", "results", "precision", "flops", "bytes")
    return {
        "target_kind": target.kind,
        "target_title": target.title,
        "reference": target.reference,
        "target_json": json.dumps({name: data[name] for name in wanted}, ensure_ascii=False),
        "share": target.share,
        "time_us": target.time_us,
        "floor_us": target.floor_us,
    }


def write_dataset(folder: Path, sources: Iterable[Source], licence: str, *, prompts: bool) -> None:
    """The Parquet file and its card. Raises MachineError without pyarrow."""
    arrow, parquet = _pyarrow()
    columns = {**COLUMNS, **(PROMPTS if prompts else {})}
    sources = tuple(sources)
    rows = [row for source in sources for row in source.rows]
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, (kind, _) in columns.items()])
    table = arrow.table({name: [_number(row.get(name)) for row in rows] for name in columns}, schema=schema)
    (folder / "data").mkdir()
    parquet.write_table(table, folder / "data" / "train-00000-of-00001.parquet", compression="zstd")
    (folder / "README.md").write_text(card(sources, columns, licence), encoding="utf-8")


def check_pyarrow() -> None:
    """Raises MachineError, before any work, where pyarrow is missing."""
    _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MachineError("--format dataset needs pyarrow: pip install 'overnight[dataset]'.") from error
    return pa, parquet


def _number(value: Any) -> Any:
    """Infinities are strings in our JSON."""
    return float(value) if isinstance(value, str) and value in {"inf", "-inf", "nan"} else value


def card(sources: Iterable[Source], columns: Mapping[str, tuple[str, str]], licence: str) -> str:
    """The dataset card: metadata that the Hub reads, what is in it, how it was judged, what it cannot tell."""
    rows = [row for source in sources for row in source.rows]
    counts = Counter(row["status"] for row in rows)
    devices = sorted({str(row["device"]) for row in rows if row.get("device")})
    size = next(word for limit, word in SIZES if len(rows) < limit)
    fields = "\n".join(f"| `{name}` | {kind.rstrip('_')} | {words} |" for name, (kind, words) in columns.items())
    statuses = ", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "none"
    prompts = "with prompts and replies" if "prompt" in columns else "without prompts and replies"
    sessions = len({row["session"] for row in rows})
    measured = ", ".join(devices) or "unknown"
    return f"""---
license: {licence}
pretty_name: Kernel experiments judged by Overnight
size_categories:
- {size}
tags:
- kernels
- code
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# Kernel experiments judged by Overnight

{len(rows)} experiments ({statuses}) of {sessions} sessions, {prompts}. Each row is one
candidate kernel for one region of a PyTorch model and its verdict, failures included. Measured on: {measured}.

A candidate is accepted when it passes five stages (smoke, shapes, stability, determinism, edge) against float64 truth
on secret inputs; it is a keep when the lower end of its speedup's interval is above what noise and policy ask for, and
the whole model ran no slower with it. Timings hold for the named device alone. Rows `environment` and `interrupted` say
nothing about their kernel. Rejected kernels are here for the record: do not use them.

| column | type | what |
|---|---|---|
{fields}
"""


SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**12, "100K<n<1M"))

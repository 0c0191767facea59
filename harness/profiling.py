"""Profiles a model: what could be replaced, what each part costs inside the deployed mode, and what it must cost.

The deployed mode is the model compiled by Inductor, with CUDA graphs on a GPU. Times are of the generated code's own
statements, each traced back to the regions it computes, so the shares are a disjoint cover of the measured total: the
rest is launch, idle or not captured, and is said. Times of a shared machine are those of the faster half of the runs
and still noisy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness import device, marks, targets
from harness.attribution import owners_of, reasons_of, shares_of
from harness.capture import Capture, capture
from harness.example_inputs import InputSet
from harness.instrument import Instrumented, MeasurementError, compile_instrumented, instrumenting
from harness.loading import LoadedModel, load_model
from harness.marks import Marking
from harness.measured import Measured
from harness.records import ProfileReport, ProfileRequest, Target
from harness.roofline import floor_us
from harness.rpc import EventSink
from harness.targets import Draft
from harness.weighing import Samples, Weighed, merged

PRODUCT_KINDS = frozenset({"linear", "matmul", "conv", "attention"})
CPU_BUDGET_S = 5.0
MIN_ROUNDS, MAX_ROUNDS = 3, 60
LAUNCH_BOUND_FACTOR = 2.0
NAMED_SHARE = 0.002  # smaller parts of what no target holds are not named


@dataclass
class Bill:
    """µs of one forward by region, and what no region owns."""

    regions: dict[int, float] = field(default_factory=dict)
    unowned: float = 0.0
    left_out: dict[str, float] = field(default_factory=dict)  # parts of `unowned` whose reason is known
    notes: list[str] = field(default_factory=list)

    def total(self) -> float:
        """µs of all statements."""
        return sum(self.regions.values()) + self.unowned


def profile(request: ProfileRequest, emit: EventSink) -> ProfileReport:
    """Profile a model and write its targets below the request's folder. Raises InputError for what cannot be used."""
    emit("progress", {"message": "loading the model"})
    loaded = load_model(request.model)
    sets = [one for one in loaded.input_sets if one.weight > 0] or [InputSet(loaded.args, loaded.kwargs)]
    weighed = []
    for one in sets:
        if len(sets) > 1:
            emit("progress", {"message": f"inputs {one.name}, weight {one.weight:g}"})
        report, samples = _profile_set(replace(loaded, args=one.args, kwargs=dict(one.kwargs)), emit)
        weighed.append(Weighed(one.name, one.weight, report, samples))
    report, samples = merged(weighed) if len(weighed) > 1 else (weighed[0].report, weighed[0].samples)
    targets.save(Path(request.folder), report, samples)
    return report


def _profile_set(loaded: LoadedModel, emit: EventSink) -> tuple[ProfileReport, Samples]:
    """The profile of one set of inputs."""
    emit("progress", {"message": "capturing its graphs"})
    found = capture(loaded)
    drafts = targets.draft_targets(found)
    drafts += targets.draft_fusions(found, drafts)
    emit("progress", {"message": f"{len(drafts)} different regions and fusions; running them on the captured inputs"})
    targets.observe(found, drafts)
    emit("progress", {"message": "compiling and measuring the model"})
    try:
        measured = measure(loaded)
        bill = bill_of(found, measured)
    except MeasurementError as error:
        measured, bill = measure_regions(loaded, drafts, str(error))
    return assemble(loaded, found, drafts, measured, bill, device.peaks(loaded.device))


def measure(loaded: LoadedModel) -> Measured:
    """Time the deployed mode of a model, statement by statement. Raises MeasurementError when none can be told."""
    if loaded.device == "cuda":
        from harness.device_trace import measure_cuda

        return measure_cuda(loaded)
    return _measure_cpu(loaded)


@dataclass(frozen=True)
class _Round:
    """One marked run: its wall time and its statements', all µs."""

    wall_us: float
    spent: Mapping[int, float]


def _measure_cpu(loaded: LoadedModel) -> Measured:
    made = compile_instrumented(loaded.model, {})
    with torch.no_grad():
        with instrumenting(made):
            made.call(*loaded.args, **loaded.kwargs)
        made.require_statements()
        totals, rounds = _clock(made, loaded)
    total_us = 1e6 * lower_quartile(totals)
    return Measured("compile", total_us / 1e3, _scaled(rounds, total_us), made.statements, made.graphs)


def lower_quartile(values: Sequence[float]) -> float:
    """The median of the faster half: other programs on a shared CPU only ever add time."""
    return median(sorted(values)[: max(1, (len(values) + 1) // 2)])


def _scaled(rounds: Sequence[_Round], total_us: float) -> dict[int, float]:
    """µs per statement: its median part of the faster half of the marked runs, of the model's time."""
    fast = sorted(rounds, key=lambda each: each.wall_us)[: max(1, (len(rounds) + 1) // 2)]
    numbers = {number for each in fast for number in each.spent}
    parts = {number: median(each.spent.get(number, 0.0) / each.wall_us for each in fast) for number in numbers}
    covered = median(sum(each.spent.values()) / each.wall_us for each in fast)
    scale = covered / sum(parts.values()) if sum(parts.values()) > 0 else 0.0
    return {number: total_us * part * scale for number, part in parts.items()}


def _clock(made: Instrumented, loaded: LoadedModel) -> tuple[list[float], list[_Round]]:
    """Alternate plain runs (seconds) and marked runs within the time allowed."""
    for _ in range(2):
        made.call(*loaded.args, **loaded.kwargs)
    totals: list[float] = []
    rounds: list[_Round] = []
    deadline = time.perf_counter() + CPU_BUDGET_S
    while len(rounds) < MAX_ROUNDS and (len(rounds) < MIN_ROUNDS or time.perf_counter() < deadline):
        start = time.perf_counter()
        made.call(*loaded.args, **loaded.kwargs)
        totals.append(time.perf_counter() - start)
        marks.start(Marking.CLOCK)
        start = time.perf_counter()
        made.call(*loaded.args, **loaded.kwargs)
        wall = time.perf_counter() - start
        rounds.append(_Round(1e6 * wall, marks.stop()))
    return totals, rounds


def measure_regions(loaded: LoadedModel, drafts: Sequence[Draft], reason: str) -> tuple[Measured, Bill]:
    """The way out where generated code cannot be read: eager times of the references, scaled to the model's total."""
    compiled = torch.compile(loaded.model, dynamic=False)
    bill = Bill(notes=[f"times are of each region run alone and scaled to the model's: {reason}"])
    with torch.no_grad():
        total_us = 1e6 * lower_quartile(_seconds(lambda: compiled(*loaded.args, **loaded.kwargs), loaded.device))
        for draft in drafts:
            if draft.samples and not draft.mismatch and not draft.members:
                spent = 1e6 * lower_quartile(_seconds(_reference_call(draft, loaded.device), loaded.device))
                bill.regions.update({id(region): spent for _, region in draft.sites})
    scale = min(1.0, total_us / bill.total()) if bill.total() else 1.0
    bill.regions = {key: spent * scale for key, spent in bill.regions.items()}
    return Measured("compile", total_us / 1e3, {}, (), ()), bill


def _reference_call(draft: Draft, place: str) -> Callable[[], Any]:
    scope: dict[str, Any] = {}
    exec(compile(draft.written.source, "<reference>", "exec"), scope)  # noqa: S102 - our own generated text
    arguments = [tensor.to(place) for tensor in draft.samples[0]]
    return lambda: scope["reference"](*arguments)


def _seconds(call: Callable[[], Any], place: str) -> list[float]:
    call()
    found: list[float] = []
    deadline = time.perf_counter() + 0.5
    while len(found) < MIN_ROUNDS or (len(found) < MAX_ROUNDS and time.perf_counter() < deadline):
        device.synchronize(place)
        start = time.perf_counter()
        call()
        device.synchronize(place)
        found.append(time.perf_counter() - start)
    return found


def bill_of(found: Capture, measured: Measured) -> Bill:
    """Divide the statements' times among the regions."""
    bill = Bill()
    same = len(found.graphs) == len(measured.graphs)
    owners = [owners_of(graph) for graph in found.graphs]
    reasons = [reasons_of(graph) for graph in found.graphs]
    for number, graph in enumerate(found.graphs):
        if not same or measured.graphs[number] != graph.names:
            bill.notes.append(f"graph {number} compiled to other nodes than captured: its time is not attributed")
    shared = 0.0
    for statement in measured.statements:
        spent = measured.statement_us.get(statement.number, 0.0)
        known = same and measured.graphs[statement.graph] == found.graphs[statement.graph].names
        parts = shares_of(statement, owners[statement.graph]) if known else []
        if not parts:
            bill.unowned += spent
            why = reasons[statement.graph] if known else {}
            reason = next((why[name] for name in reversed(statement.names) if name in why), "")
            if reason:
                bill.left_out[reason] = bill.left_out.get(reason, 0.0) + spent
        if len(parts) > 1:
            shared += spent
        for region, part in parts:
            bill.regions[id(region)] = bill.regions.get(id(region), 0.0) + spent * part
    if shared and bill.total():
        bill.notes.append(
            f"{shared / bill.total():.0%} of the time is in kernels of several targets, divided by bytes written"
        )
    return bill


def assemble(
    loaded: LoadedModel,
    found: Capture,
    drafts: Sequence[Draft],
    measured: Measured,
    bill: Bill,
    peaks: Mapping[str, float],
) -> tuple[ProfileReport, dict[str, list[tuple[torch.Tensor, ...]]]]:
    """The report, ranked, and the samples of its targets."""
    total_us = max(1e3 * measured.total_ms, bill.total())
    calls = {number: max(1, len(graph.calls)) for number, graph in enumerate(found.graphs)}
    notes = [*found.notes, *measured.notes, *bill.notes]
    ranked: list[Target] = []
    samples: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    uncaptured = bill.unowned
    notes += [
        f"{spent / total_us:.1%} of the time is in no target: {reason}"
        for reason, spent in sorted(bill.left_out.items(), key=lambda item: -item[1])
        if spent > NAMED_SHARE * total_us
    ]
    for draft in drafts:
        spent = sum(bill.regions.get(id(part), 0.0) for _, region in draft.sites for part in region.parts or (region,))
        if draft.mismatch:
            notes.append(f"{draft.id} is not offered: {draft.mismatch}")
            uncaptured += 0.0 if draft.members else spent
            continue
        ranked.append(_timed(targets.finish(draft, calls), spent, total_us, peaks))
        samples[draft.id] = draft.samples
    ranked.sort(key=lambda target: (-target.model_gain(), -target.share, target.id))
    report = ProfileReport(
        model=loaded.name,
        device=loaded.device,
        device_name=device.device_name(loaded.device),
        mode=measured.mode,
        total_ms=total_us / 1e3,
        idle_share=_idle_share(bill, total_us),
        uncaptured_share=uncaptured / total_us,
        targets=tuple(ranked),
        peaks=dict(peaks),
        notes=tuple(notes),
        fingerprint={**device.versions(loaded.device), **loaded.fingerprint},
    )
    return report, samples


def _idle_share(bill: Bill, total_us: float) -> float:
    return max(0.0, 1.0 - bill.total() / total_us) if total_us > 0 else 0.0


def _timed(target: Target, spent_us: float, total_us: float, peaks: Mapping[str, float]) -> Target:
    """The target with its time per call, share, floor and launch mark."""
    dtype = target.outputs[0].dtype
    floor = floor_us(
        target.flops, target.bytes, dtype, peaks, product=target.kind in PRODUCT_KINDS or bool(target.members)
    )
    per_call = spent_us / len(target.call_sites)
    launch = peaks.get("launch_us", 0.0)
    return replace(
        target,
        time_us=per_call,
        floor_us=floor,
        share=spent_us / total_us,
        launch_bound=floor < launch and per_call <= LAUNCH_BOUND_FACTOR * max(launch, floor) * 2,
    )

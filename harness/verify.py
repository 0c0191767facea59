"""The whole model with its kept kernels: are the outputs right, and is it faster than the best a user has today?

Outputs are compared with the eager model (`harness.soundness`); all modes are timed interleaved in this process
(`harness.latency`). Intervals do not cover what differs between processes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from harness.errors import InputError
from harness.kernel_op import TORCH_FAILURES, Kernel, read_kernel
from harness.latency import Call, Interval, interval, measure, speedup
from harness.modes import COMPILE, EAGER, MODES, OVERNIGHT, ModelCall, build_mode, held_bytes, peak_memory_mb, why_not
from harness.optimized import Optimized, optimize
from harness.outputs import Difference, copied, redrawn, restored
from harness.records import ModelGain, ModeMeasurement, SiteCounts, TextAgreement, VerifyReport, VerifyRequest
from harness.rpc import EventSink
from harness.soundness import Inputs, check, eager_randomness

BEFORE = "before the newest kernel"
LOOP_MODES = (OVERNIGHT, COMPILE, EAGER)  # what a session re-measures after each keep
CPU_BUDGET_S = 12.0
GPU_BUDGET_S = 6.0
RECOMPILES = 64  # every mode and every leave-one-out of one model shares Dynamo's limit per code object
SECOND_SEED = 20261130
MORE_SETS = 3  # further input sets whose outputs are compared


Builder = Callable[[nn.Module, Sequence[Kernel]], Optimized]


def spliced(model: nn.Module, kernels: Sequence[Kernel]) -> Optimized:
    """The model as a session delivers it; without the global pass, so that the other modes stay what a user has."""
    return optimize(model, kernels, under_compile=False)


class Loaded(Protocol):
    """What is needed of a loaded model (harness/loading.py)."""

    @property
    def model(self) -> nn.Module:
        """The model, in eval mode on its device."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Example positional inputs."""

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Example keyword inputs."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def input_sets(self) -> Sequence[Any]:
        """All example inputs, each with args and kwargs; args and kwargs above are the first one's."""


@dataclass(frozen=True)
class Sites:
    """Kernel executions in one call of the model, per target id, and the sites that stayed the original."""

    applied: Mapping[str, int]
    fallback: Mapping[str, int]
    reasons: tuple[str, ...] = ()


@dataclass
class Timings:
    """What was measured: samples in ms per mode (paired by round), peaks, and why a mode is missing."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    peaks_mb: dict[str, float | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def verify(request: VerifyRequest, emit: EventSink) -> VerifyReport:
    """Measure a model with kernels in it; raises InputError for a model, a target or a mode that cannot be used."""
    from harness.loading import load_model

    unknown = sorted(set(request.modes) - set(MODES))
    if unknown:
        raise InputError(f"unknown mode {unknown[0]!r}; the modes are {', '.join(MODES)}.")
    kernels = [read_kernel(kept) for kept in request.kernels]
    return verify_model(
        load_model(request.model),
        kernels,
        emit,
        modes=request.modes,
        bisect=request.bisect,
        before=None if request.before is None else [read_kernel(kept) for kept in request.before],
    )


def verify_model(
    loaded: Loaded,
    kernels: Sequence[Kernel],
    emit: EventSink,
    *,
    modes: Sequence[str] = (),
    bisect: bool = False,
    before: Sequence[Kernel] | None = None,
    budget_s: float | None = None,
    build: Builder = spliced,
) -> VerifyReport:
    """The report for a model in this process; `build` makes the optimised model of the original and kernels."""
    on_gpu = str(loaded.device).startswith("cuda")
    subject = ModelCall(loaded.model, tuple(loaded.args), dict(loaded.kwargs), on_gpu)
    budget = budget_s if budget_s is not None else GPU_BUDGET_S if on_gpu else CPU_BUDGET_S
    with _fresh_compiler(), torch.no_grad():
        ours = build(subject.model, kernels)
        sites, difference = _outputs(ours, subject, kernels, _other_inputs(loaded))
        text = _text(ours, loaded) if difference.ok else None
        if text is not None and not text.ok:
            difference = replace(difference, ok=False, detail=_said_of_text(text))
        emit("outputs", {"ok": difference.ok, "max_error": _finite(difference.max_error), "detail": difference.detail})
        earlier = None if before is None else build(subject.model, before)
        timings = _timings(ours, subject, modes, budget, emit, earlier)
        suspects = _suspects(subject, kernels, difference.ok, budget, emit, build) if bisect else ()
    return replace(_report(loaded, timings, difference, sites, suspects), text=text)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled for an earlier request stays alive, and no mode is left out for the number of recompilations."""
    from torch._dynamo import config

    torch._dynamo.reset()  # noqa: SLF001 - the documented way to drop compiled code
    names = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")
    limits = {name: RECOMPILES * (4 if "accumulated" in name else 1) for name in names if hasattr(config, name)}
    with config.patch(limits):
        yield


def _text(ours: Optimized, loaded: Loaded) -> TextAgreement | None:
    """How a language model reads text with its kernels; None for other models."""
    from harness.language import agreement

    given = bool(getattr(loaded, "given", False))
    return agreement(ours, loaded.model, (tuple(loaded.args), dict(loaded.kwargs)), given=given)


def _said_of_text(text: TextAgreement) -> str:
    return (
        f"{text.differing} of {text.steps} teacher-forced steps choose another word, not all of them ties; perplexity "
        f"{text.perplexity:.4g} instead of {text.perplexity_eager:.4g}"
    )


def _other_inputs(loaded: Loaded) -> list[Inputs]:
    """The user's further input sets, a few of them."""
    return [(tuple(one.args), dict(one.kwargs)) for one in loaded.input_sets[1 : 1 + MORE_SETS]]


def _outputs(
    ours: Optimized, subject: ModelCall, kernels: Sequence[Kernel], others: Sequence[Inputs]
) -> tuple[Sites, Difference]:
    """Compare on the captured inputs, on fresh values of their shapes and on `others`; count the sites in one call."""
    captured: Inputs = (subject.args, subject.kwargs)
    try:
        with eager_randomness(subject.model, captured):
            sites = _count_sites(ours, subject, kernels)
            return sites, _compared(ours, subject, (captured, redrawn(captured, SECOND_SEED), *others))
    except TORCH_FAILURES as error:
        failure = f"the optimised model raised {type(error).__name__}: {_first_line(error)}"
        nowhere = Sites({}, {kernel.target.id: len(kernel.target.call_sites) for kernel in kernels})
        return nowhere, Difference(ok=False, max_error=float("inf"), detail=failure)


def _compared(ours: Optimized, subject: ModelCall, sets: Sequence[Inputs]) -> Difference:
    """The first difference that is too large, or the largest of the small ones."""
    worst, notes = 0.0, dict[str, None]()
    for inputs in sets:
        difference = check(ours, subject.model, inputs)
        worst = max(worst, difference.max_error)
        if not difference.ok:
            return Difference(ok=False, max_error=worst, detail=difference.detail)
        if difference.detail:
            notes[difference.detail] = None
    return Difference(ok=True, max_error=worst, detail="; ".join(notes))


def _count_sites(ours: Optimized, subject: ModelCall, kernels: Sequence[Kernel]) -> Sites:
    """One call, the first: with CUDA graphs it is the warm-up run, in which each op still passes through Python."""
    before = ours.calls()
    args, kwargs = copied((subject.args, subject.kwargs))
    with restored(subject.model):
        ours(*args, **kwargs)
    applied = {target: count - before[target] for target, count in ours.calls().items()}
    fallback = {}
    covered = Counter[str]()  # sites at which a fusion does a member's work are no fallbacks
    for target in (kernel.target for kernel in kernels):
        covered.update({name: times * applied.get(target.id, 0) for name, times in Counter(target.members).items()})
    for target in (kernel.target for kernel in kernels):
        unreached = len(target.call_sites) - applied.get(target.id, 0) - covered[target.id]
        fallback[target.id] = max(ours.sites.fallback.get(target.id, 0), unreached, 0)
    return Sites(applied, fallback, tuple(ours.sites.reasons))


def _timings(
    ours: Optimized,
    subject: ModelCall,
    requested: Sequence[str],
    budget_s: float,
    emit: EventSink,
    earlier: Optimized | None,
) -> Timings:
    """Warm every mode up, then time those that work together; a mode's failure is its own.

    `earlier` is the model with the kernels kept until now, made in the same way, so that nothing else differs.
    """
    timings, calls = Timings(), dict[str, Call]()
    with restored(subject.model):
        for mode in MODES:
            reason = why_not(mode, requested, on_gpu=subject.on_gpu)
            if reason is None:
                reason = _warm_up(mode, ours, subject, calls, timings)
            if reason is not None:
                timings.missing[mode] = reason
            emit("mode", {"mode": mode, "ready": reason is None, "reason": reason})
        if earlier is not None:
            calls[BEFORE] = build_mode(OVERNIGHT, subject, earlier)
        timings.samples = measure(calls, on_gpu=subject.on_gpu, budget_s=budget_s) if calls else {}
    return timings


def _warm_up(mode: str, ours: Optimized, subject: ModelCall, calls: dict[str, Call], timings: Timings) -> str | None:
    """Add a warm call and its peak memory; the reason when the mode does not run."""
    before = held_bytes(on_gpu=subject.on_gpu)
    try:
        call = build_mode(mode, subject, ours)
        timings.peaks_mb[mode] = peak_memory_mb(call, subject, held_bytes(on_gpu=subject.on_gpu) - before)
    except TORCH_FAILURES as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    calls[mode] = call
    return None


def _suspects(
    subject: ModelCall,
    kernels: Sequence[Kernel],
    outputs_ok: bool,  # noqa: FBT001 - a fact, not a switch
    budget_s: float,
    emit: EventSink,
    build: Builder,
) -> tuple[str, ...]:
    """The kernels that break outputs (each alone in the model), or else slow it (all but one, interleaved)."""
    if not outputs_ok:
        broken = []
        for kernel in kernels:
            alone = build(subject.model, [kernel])
            ok = _outputs(alone, subject, [kernel], [])[1].ok
            emit("bisect", {"target": kernel.target.id, "ok": ok})
            if not ok:
                broken.append(kernel.target.id)
        return tuple(broken)
    calls: dict[str, Call] = {"": build_mode(OVERNIGHT, subject, build(subject.model, kernels))}
    for index, kernel in enumerate(kernels):
        others = [*kernels[:index], *kernels[index + 1 :]]
        calls[kernel.target.id] = build_mode(OVERNIGHT, subject, build(subject.model, others))
        emit("bisect", {"target": kernel.target.id, "ok": True})
    samples = measure(calls, on_gpu=subject.on_gpu, budget_s=budget_s)
    return tuple(left_out for left_out in samples if left_out and speedup(samples[left_out], samples[""]).low > 1.0)


def _report(
    loaded: Loaded, timings: Timings, difference: Difference, sites: Sites, suspects: tuple[str, ...]
) -> VerifyReport:
    mine = timings.samples.get(OVERNIGHT, [])
    others = {mode: samples for mode, samples in timings.samples.items() if mode not in {OVERNIGHT, BEFORE}}
    versus = {mode: speedup(mine, samples) for mode, samples in others.items()} if mine else {}
    best = min(versus, key=lambda mode: versus[mode].median, default=None)
    not_applied = [target for target, count in sites.applied.items() if not count]
    notes = [
        difference.detail,
        f"against {best}: {_said(versus[best])}" if best else "",
        f"not applied: {', '.join(not_applied)}" if not_applied else "",
        *sites.reasons,
    ]
    return VerifyReport(
        model=loaded.name,
        device="cuda" if str(loaded.device).startswith("cuda") else "cpu",
        device_name=_device_name(str(loaded.device)),
        modes=tuple(_measurement(mode, timings) for mode in MODES),
        outputs_ok=difference.ok,
        max_error=difference.max_error,
        faster=best is not None and versus[best].low > 1.0,
        model_speedup=versus[best].median if best else None,
        model_speedup_vs_eager=versus[EAGER].median if EAGER in versus else None,
        sites=SiteCounts(sum(sites.applied.values()), sum(sites.fallback.values())),
        applied=dict(sites.applied),
        detail="; ".join(note for note in notes if note),
        suspects=suspects,
        newest=_newest(mine, timings.samples.get(BEFORE, [])),
        versus={mode: ModelGain(found.median, found.low, found.high) for mode, found in versus.items()},
    )


def _newest(mine: Sequence[float], before: Sequence[float]) -> ModelGain | None:
    if not mine or not before:
        return None
    found = speedup(mine, before)
    return ModelGain(found.median, found.low, found.high)


def _measurement(mode: str, timings: Timings) -> ModeMeasurement:
    if not timings.samples.get(mode):
        return ModeMeasurement(mode, None, None, None, None, timings.missing.get(mode, "not run"))
    found = interval(timings.samples[mode])
    return ModeMeasurement(mode, found.median, found.low, found.high, timings.peaks_mb.get(mode))


def _said(ratio: Interval) -> str:
    return f"{ratio.median:.3f}x ({ratio.low:.3f}-{ratio.high:.3f})"


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _finite(value: float) -> float | str:
    return value if value == value and abs(value) != float("inf") else str(value)

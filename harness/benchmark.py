"""The benchmark's decision: what must be beaten, how noisy this machine is, and whether a candidate is a keep.

The incumbent is the kept kernel, or the faster of eager and torch.compile measured in processes of ours. A keep needs
three process pairs, the lower bound above the bar, every pair ahead, no case behind, and the challenge chain.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch

from harness.device import clocks, unslowed
from harness.doubts import doubt
from harness.errors import MachineError
from harness.intervals import Interval, bar, clustered_interval, geometric_mean, process_noise
from harness.lanes import CANDIDATE, Lane, Pair, Racer, challenge, fresh_run, per_call, race, show_the_work
from harness.oracle import Oracle
from harness.problem import Case
from harness.records import Blame, JudgeRequest, Status, Timing
from harness.stages import ARENA_SLACK, Refusal, candidate_failures, input_bytes, output_bytes
from harness.workshop import Execution, KernelRaised, WorkerDied, WorkerOutOfMemory, WorkerTimeout, Workshop

PROCESS_PAIRS = 3
QUADS = {"cpu": 6, "cuda": 12}
BASELINE_QUADS = {"cpu": 6, "cuda": 6}
CONFIRMING_PAIRS = {"cpu": 2, "cuda": 1}
"""A win is confirmed in this many further processes before it is a keep."""
MIN_NOISE = {"cpu": 0.02, "cuda": 0.0}
"""Two pairs of processes may agree by chance; a shared CPU is never quieter than this (facts.md: several percent)."""
MAX_NOISE = 1.0
"""A/A noise above this says that the machine cannot time anything: "unreliable", never an endless wait."""
RUN_SECONDS = {"cpu": 3e-3, "cuda": 5e-4}
"""Work of one timed run: the round trip (0.1 ms) weighs little, and a run often falls between two disturbances."""
MIN_SETS, MAX_SETS = 4, 64
NOISE_LASTS_S = 300.0
SLOWED_PATIENCE_S = 30.0
"""A GPU that is too hot is waited for this long, then the verdict is "unreliable"."""
HEADROOM = {"cpu": 1.3, "cuda": 1.05}
"""A first process this far below the bar ends the benchmark: the others could not make up for it."""
NO_PRECOMPILED_HEADERS = "import torch._inductor.config\ntorch._inductor.config.cpp_cache_precompile_headers = False\n"
"""Inductor would precompile its headers anew in each fresh process: 6.4 s of CPU time, nothing of what is timed."""
SET_GAP = 1 << 18
MAX_SET_BYTES = {"cpu": 1 << 24, "cuda": 1 << 32}
"""Inputs and kept outputs of one run. On a CPU about what a last-level cache holds: in a model a region reads what was
just written, and in rotated DRAM every memory-bound kernel takes the same time (RoPE of 0.5 MiB: 70 µs for 30)."""
REJUDGE_ABOVE = 3.0
SUSPICIOUS_ABOVE = 1.5
FLOOR_SHARE = 0.8
PEAK_BYTES_PER_S = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.04e12, "L40S": 0.864e12, "4090": 1.01e12}
"""Specified memory bandwidth by device name (vendors' data sheets); an unknown device has no floor."""
PEAK_FLOPS = {("H200", 2): 989e12, ("H100", 2): 989e12, ("A100", 2): 312e12, ("H200", 4): 495e12, ("H100", 4): 495e12}
"""Specified dense FLOP/s by device and bytes per element (TF32 for float32: no honest kernel is faster)."""


@dataclass
class CaseBaseline:
    """What a candidate has to beat at one bench case, and how much identical processes differ there."""

    case: Case
    sets: int
    incumbent: Racer
    eager_seconds: float
    eager_over_incumbent: float
    noise: float = 0.0
    measured_at: float = 0.0


class Baselines:
    """The incumbent's processes of one target, kept open for all its candidates, and what they measured."""

    def __init__(self, workshop: Workshop, oracle: Oracle, incumbent: str | None) -> None:
        self._workshop, self._oracle = workshop, oracle
        self._nbytes = lane_bytes(oracle, workshop.device)
        self._lanes: dict[str, list[Lane]] = {}
        self._eager, compiled = reference_racers(oracle)
        self._rival = kernel_racer("kept", incumbent, workshop.device) if incumbent is not None else compiled
        self.cases: list[CaseBaseline] = []
        try:
            self._must_run = incumbent is not None
            self.cases = [self._measured(case) for case in oracle.problem.bench]
            self._end_losers()
            for baseline in self.cases:
                self.refresh_noise(baseline)
        except BaseException:
            self.close()
            raise

    def lane(self, racer: Racer, index: int) -> Lane:
        """Process number `index` of a racer, opened when it is first wanted."""
        lanes = self._lanes.setdefault(racer.name, [])
        while len(lanes) <= index:
            lanes.append(Lane(self._workshop, self._oracle, racer, self._nbytes))
        return lanes[index]

    def incumbent(self, baseline: CaseBaseline, index: int) -> Lane:
        """The incumbent's process for pair `index`, ready for this case."""
        try:
            lane = self.lane(baseline.incumbent, index % PROCESS_PAIRS)
            lane.take(baseline.case, baseline.sets)
        except (KernelRaised, WorkerDied, WorkerTimeout, WorkerOutOfMemory) as error:
            said = f"the process of the incumbent ({baseline.incumbent.name}) failed: {error}"
            raise MachineError(said) from error
        return lane

    def refresh_noise(self, baseline: CaseBaseline) -> None:
        """A/A noise between the incumbent's processes, measured again when the last figure is old or was bad."""
        age = time.monotonic() - baseline.measured_at
        if baseline.measured_at and age < NOISE_LASTS_S and baseline.noise < MAX_NOISE / 4:
            return
        quads = BASELINE_QUADS[self._workshop.device]
        lanes = [self.incumbent(baseline, index) for index in range(PROCESS_PAIRS)]
        seen = process_noise([race(a, b, quads, examined=False).centre for a, b in pairwise(lanes)])
        baseline.noise = max(seen, MIN_NOISE[self._workshop.device], baseline.noise / 2)
        baseline.measured_at = time.monotonic()

    def close(self) -> None:
        """End all processes."""
        for lanes in self._lanes.values():
            for lane in lanes:
                lane.close()
        self._lanes.clear()

    def _measured(self, case: Case) -> CaseBaseline:
        eager = self.lane(self._eager, 0)
        sets = _set_count(self._oracle, eager, case)
        eager.take(case, sets)
        quads = BASELINE_QUADS[self._workshop.device]
        rival = self._ready_rival(case, sets)
        pair = race(eager, rival or eager, quads, examined=False)
        if rival is None or not (self._must_run or pair.centre > 0):
            return CaseBaseline(case, sets, self._eager, pair.a_seconds, 1.0)
        return CaseBaseline(case, sets, self._rival, pair.a_seconds, math.exp(pair.centre))

    def _ready_rival(self, case: Case, sets: int) -> Lane | None:
        """None where torch.compile cannot handle the reference; a kept kernel must still run."""
        try:
            rival = self.lane(self._rival, 0)
            rival.take(case, sets)
        except (KernelRaised, WorkerDied, WorkerTimeout, WorkerOutOfMemory) as error:
            for lane in self._lanes.pop(self._rival.name, []):
                lane.close()
            if self._must_run:
                said = f"the kept kernel no longer runs: {error}"
                raise Refusal(Status.ENVIRONMENT, said, "incumbent", Blame.ENVIRONMENT) from error
            return None
        return rival

    def _end_losers(self) -> None:
        wanted = {baseline.incumbent.name for baseline in self.cases}
        for name in set(self._lanes) - wanted:
            for lane in self._lanes.pop(name):
                lane.close()


def reference_racers(oracle: Oracle) -> tuple[Racer, Racer]:
    """PyTorch eager and torch.compile's artefact, in processes that no candidate ever touches."""
    text = oracle.problem.reference
    return (
        Racer("eager", text, "reference", Execution.PLAIN, trusted=True),
        Racer("compile", NO_PRECOMPILED_HEADERS + text, "reference", Execution.COMPILE, trusted=True),
    )


def kernel_racer(name: str, source: str, device: str) -> Racer:
    """A kernel file, called on the CPU as the spliced model would call it."""
    execution = Execution.OP if device == "cpu" else Execution.PLAIN
    return Racer(name, source, "kernel_fn", execution, trusted=False)


def lane_bytes(oracle: Oracle, device: str) -> int:
    """Room for the input sets of the largest bench case and two sets of outputs."""
    sizes = [(input_bytes(case), output_bytes(oracle, case)) for case in oracle.problem.bench]
    return (
        max(
            min(MAX_SETS * (inputs + SET_GAP), max(MAX_SET_BYTES[device], 2 * inputs) + MAX_SETS * SET_GAP)
            + 2 * outputs
            for inputs, outputs in sizes
        )
        + ARENA_SLACK
    )


def _set_count(oracle: Oracle, eager: Lane, case: Case) -> int:
    """Enough calls for RUN_SECONDS of work, within memory."""
    device = eager.device
    fitting = max(2, MAX_SET_BYTES[device] // max(1, input_bytes(case) + output_bytes(oracle, case)))
    eager.take(case, 2)
    seconds = min(per_call(eager, [fresh_run(eager)]) for _ in range(4))
    wanted = math.ceil(RUN_SECONDS[device] / max(seconds, 1e-7))
    return min(max(wanted, MIN_SETS), MAX_SETS, fitting)


# ---------------------------------------------------------------------------------------------- the verdict's timing


@dataclass(frozen=True)
class Outcome:
    """The benchmark's result: keep or discard, why, and the figures."""

    status: Status
    detail: str
    timing: Timing


@dataclass(frozen=True)
class CaseResult:
    """One bench case of one candidate."""

    baseline: CaseBaseline
    interval: Interval
    pairs: tuple[Pair, ...]


@dataclass
class _Races:
    """All pairs of one candidate so far, by bench case."""

    pairs: list[list[Pair]]
    peak_memory_mb: float | None = None
    prepack_seconds: list[float] = field(default_factory=list)
    clocks: list[str] = field(default_factory=list)

    def results(self, cases: Sequence[CaseBaseline], trials: int) -> list[CaseResult]:
        """The interval of each case, as wide as `trials` earlier candidates demand."""
        return [
            CaseResult(baseline, clustered_interval([p.log_ratios for p in pairs], trials=trials), tuple(pairs))
            for baseline, pairs in zip(cases, self.pairs, strict=True)
        ]


def run_benchmark(
    workshop: Workshop,
    oracle: Oracle,
    baselines: Baselines,
    request: JudgeRequest,
    dtypes: Sequence[str] | None,
    seed: Path | None = None,
) -> Outcome:
    """Race the candidate in fresh processes at every case; raises Refusal where an output or a clock is wrong.

    `seed` holds what earlier workers of the candidate compiled.
    """
    unslowed(workshop.device, SLOWED_PATIENCE_S)
    cases = [case for case in baselines.cases if dtypes is None or case.case.dtype in dtypes]
    for baseline in cases:
        baselines.refresh_noise(baseline)
        if baseline.noise > MAX_NOISE:
            said = f"unreliable: identical processes differ by {baseline.noise:.0%} on {baseline.case.name}"
            raise Refusal(Status.ENVIRONMENT, said, "unreliable", Blame.ENVIRONMENT)
    races = _Races([[] for _ in cases])
    note_clocks(workshop.device, races.clocks)
    racer = kernel_racer(CANDIDATE, request.source, workshop.device)
    wanted, process = PROCESS_PAIRS, 0
    while process < wanted:
        with candidate_failures("in the timed runs"):
            lane = Lane(workshop, oracle, racer, lane_bytes(oracle, workshop.device), seed)
        try:
            hopeless = _race_process(baselines, cases, lane, races, request.min_gain)
            note_clocks(workshop.device, races.clocks)
            process += 1
            if not hopeless and process == 1 and _jump(races) > SUSPICIOUS_ABOVE:
                show_the_work(baselines.incumbent(cases[-1], 0), lane, races.pairs[-1][-1])
            if process == PROCESS_PAIRS and _decide(races.results(cases, 0), request, oracle).status is Status.KEEP:
                wanted += CONFIRMING_PAIRS[workshop.device] + (_jump(races) > REJUDGE_ABOVE)
                challenge(lane)
                final = cases[-1]
                show_the_work(baselines.incumbent(final, process), lane, races.pairs[-1][-1])
                with candidate_failures("when its clock was doubted"):
                    doubt(baselines.incumbent(final, process), lane, races.pairs[-1][-1])
        finally:
            races.prepack_seconds += lane.prepack_seconds
            races.peak_memory_mb = max(races.peak_memory_mb or 0.0, lane.worker.peak_memory_mb or 0.0) or None
            lane.close()
        if hopeless:
            break
    results = races.results(cases, request.trials)
    for result in results:
        _above_floor(oracle, result.baseline.case, result.pairs)
    outcome = _decide(results, request, oracle, races.peak_memory_mb)
    packed_us = median(races.prepack_seconds) * 1e6 if races.prepack_seconds else None
    return replace(outcome, timing=replace(outcome.timing, prepack_us=packed_us, clocks="; ".join(races.clocks)))


def _race_process(
    baselines: Baselines, cases: Sequence[CaseBaseline], lane: Lane, races: _Races, min_gain: float
) -> bool:
    """One process of the candidate through all cases; True when a keep is out of reach."""
    device = lane.device
    headroom = HEADROOM[device]
    for baseline, pairs in zip(cases, races.pairs, strict=True):
        incumbent = baselines.incumbent(baseline, len(pairs))
        with candidate_failures("in the timed runs"):
            lane.take(baseline.case, baseline.sets)
            pairs.append(race(incumbent, lane, QUADS[device], examined=True))
    needed = bar(min_gain, max(baseline.noise for baseline in cases))
    centres = [pairs[-1].centre for pairs in races.pairs]
    return math.exp(fmean(centres)) * headroom < needed or math.exp(min(centres)) * headroom < 1


def note_clocks(device: str, notes: list[str]) -> None:
    """Log what the GPU ran at; what was timed while it protected itself counts for nothing."""
    now = clocks(device)
    if now is None:
        return
    if now.said() not in notes:
        notes.append(now.said())
    if now.slowed:
        said = f"unreliable: the GPU slowed itself down while it was timed ({now.said()})"
        raise Refusal(Status.ENVIRONMENT, said, "unreliable", Blame.ENVIRONMENT)


def _jump(races: _Races) -> float:
    return math.exp(max(fmean(pair.centre for pair in pairs) for pairs in races.pairs))


def _above_floor(oracle: Oracle, case: Case, pairs: Sequence[Pair]) -> None:
    """No kernel moves its compulsory bytes faster than the memory's specification allows."""
    bandwidth = device_peak(oracle.problem.device)
    if bandwidth is None:
        return
    floor = oracle.problem.bytes.get(case.name, 0) / bandwidth
    fastest = min(pair.b_seconds for pair in pairs)
    if fastest < FLOOR_SHARE * floor:
        raise Refusal(
            Status.CHEAT,
            f"{fastest * 1e6:.1f} µs on {case.name} is below what the memory can do ({floor * 1e6:.1f} µs)",
            "roofline",
        )


def device_peak(device: str) -> float | None:
    """Specified bytes/s of this GPU, or None where it is not known."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_BYTES_PER_S.items() if key in name), None)


def _decide(
    results: Sequence[CaseResult], request: JudgeRequest, oracle: Oracle, peak_memory_mb: float | None = None
) -> Outcome:
    together = geometric_mean([result.interval for result in results])
    noise = max(result.baseline.noise for result in results)
    needed = bar(request.min_gain, noise)
    enough = all(len(result.pairs) >= PROCESS_PAIRS for result in results)
    consistent = all(pair.centre > 0 for result in results for pair in result.pairs)
    no_loss = all(result.interval.high > 1 for result in results)
    keep = together.low > needed and enough and consistent and no_loss
    timing = _timing(results, together, noise, oracle, peak_memory_mb)
    interval = f"interval {together.low:.3g} to {together.high:.3g}"
    said = f"{together.ratio:.3g} times the incumbent ({timing.incumbent}), {interval}"
    reason = "" if keep else f"; {_why_not(results, together, needed)}"
    return Outcome(Status.KEEP if keep else Status.DISCARD, said + reason, timing)


def _why_not(results: Sequence[CaseResult], together: Interval, needed: float) -> str:
    """The first rule of a keep that is not met."""
    if together.low <= needed:
        return f"a keep needs the lower bound above {needed:.4g}"
    lost = [result for result in results if result.interval.high <= 1 or any(p.centre <= 0 for p in result.pairs)]
    if lost:
        worst = min(lost, key=lambda result: result.interval.ratio)
        return f"a keep may lose nowhere, and it is {worst.interval.ratio:.3g} times on {worst.baseline.case.name}"
    return "a keep needs more process pairs than could be run"


def _timing(
    results: Sequence[CaseResult], together: Interval, noise: float, oracle: Oracle, peak_memory_mb: float | None
) -> Timing:
    first = results[0]
    candidate = median(pair.b_seconds for pair in first.pairs)
    incumbent = median(pair.a_seconds for pair in first.pairs)
    eager = math.exp(fmean(math.log(result.baseline.eager_over_incumbent) for result in results))
    flops = oracle.problem.flops.get(first.baseline.case.name, 0)
    return Timing(
        eager_us=first.baseline.eager_seconds * 1e6,
        incumbent_us=incumbent * 1e6,
        candidate_us=candidate * 1e6,
        speedup_vs_pytorch=together.ratio * eager,
        speedup_vs_best=together.ratio,
        ci_low=together.low,
        ci_high=together.high,
        noise=noise,
        incumbent=first.baseline.incumbent.name,
        throughput_tflops=flops / candidate / 1e12 if flops else None,
        pct_peak=_percent_of_peak(oracle, first.baseline.case, candidate),
        peak_memory_mb=peak_memory_mb,
        ratios=tuple(
            tuple(round(math.exp(quad), 5) for quad in pair.log_ratios) for result in results for pair in result.pairs
        ),
    )


def _percent_of_peak(oracle: Oracle, case: Case, seconds: float) -> float | None:
    """Roofline share: the larger of bandwidth and arithmetic floor by specification, over the time taken."""
    bandwidth = device_peak(oracle.problem.device)
    if bandwidth is None:
        return None
    name = torch.cuda.get_device_name()
    itemsize = 4 if case.dtype == "float32" else 2
    peak = next((value for (key, size), value in PEAK_FLOPS.items() if key in name and size == itemsize), math.inf)
    floor = max(oracle.problem.bytes.get(case.name, 0) / bandwidth, oracle.problem.flops.get(case.name, 0) / peak)
    return 100 * floor / seconds

"""The benchmark: incumbent and candidate interleaved A B B A in fresh processes, on contents rewritten before each run.

Every timed call sees values that nobody has seen before, and what it returned is read back and compared, so a cache,
a skipped tail or work left to a thread shows as a wrong output. The clock is the judge's own, around the round trip;
a GPU worker's claim of device time must agree with it. Not protected against: a machine whose own speed changes
within one quad (the noise between processes of the incumbent raises the bar instead).
"""

import hashlib
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

import torch

from harness.arena import Arena
from harness.errors import MachineError
from harness.intervals import Interval, bar, clustered_interval, geometric_mean, process_noise, quad_log_ratio
from harness.oracle import Oracle, Question
from harness.problem import Case
from harness.records import Blame, JudgeRequest, Status, Timing
from harness.stages import (
    ARENA_SLACK,
    COMPILE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    PREPARE_TIMEOUT_S,
    Refusal,
    candidate_failures,
    check_report,
    constants_of,
    input_bytes,
    output_bytes,
    verify,
)
from harness.truth import Leaves
from harness.workshop import (
    Execution,
    KernelRaised,
    PreparedCall,
    Sample,
    Worker,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
    Workshop,
)

PROCESS_PAIRS = 3
QUADS = {"cpu": 8, "cuda": 12}
BASELINE_QUADS = {"cpu": 6, "cuda": 6}
MAX_NOISE = 0.5
"""A/A noise above this says that the machine cannot time anything: "unreliable", never an endless wait."""
RUN_SECONDS = {"cpu": 8e-3, "cuda": 5e-4}
"""One timed run holds about this much work, so that the round trip (0.1 ms) weighs little."""
MIN_SETS, MAX_SETS = 4, 64
MAX_SET_BYTES = {"cpu": 1 << 27, "cuda": 1 << 32}
CHALLENGE_LINKS = 4
REJUDGE_ABOVE = 3.0
FLOOR_SHARE = 0.8
CLOCK_AGREEMENT = 0.6
"""At least this share of the device time that a candidate claims to save must show on the judge's own clock."""
PEAK_BYTES_PER_S = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.04e12, "L40S": 0.864e12, "4090": 1.01e12}
"""Specified memory bandwidth by device name (vendors' data sheets); an unknown device has no floor."""
PEAK_FLOPS = {("H200", 2): 989e12, ("H100", 2): 989e12, ("A100", 2): 312e12, ("H200", 4): 495e12, ("H100", 4): 495e12}
"""Specified dense FLOP/s by device and bytes per element (TF32 for float32: no honest kernel is faster)."""


CANDIDATE = "candidate"


@dataclass(frozen=True)
class Racer:
    """A kernel to be timed: its text, how it is called, and whether it is ours."""

    name: str
    source: str
    entry: str
    execution: Execution
    trusted: bool


class Lane:
    """One process of one racer with its own arena, ready to run one bench case over `sets` input sets."""

    def __init__(self, workshop: Workshop, oracle: Oracle, racer: Racer, case: Case, sets: int) -> None:
        self.racer = racer
        self._oracle, self._case, self._device = oracle, case, workshop.device
        room = sets * (input_bytes(case) + (1 << 18)) + 2 * output_bytes(oracle, case) + ARENA_SLACK
        self._arena = Arena(workshop.device, room)
        self._worker: Worker | None = None
        try:
            self._worker = workshop.open(
                racer.source, self._arena, entry=racer.entry, execution=racer.execution, trusted=racer.trusted
            )
            self._worker.load(LOAD_TIMEOUT_S[self._device])
            self._lay_out(sets)
        except BaseException:
            self.close()
            raise

    def _lay_out(self, sets: int) -> None:
        oracle, case = self._oracle, self._case
        self._base = [oracle.draw(case) for _ in range(min(sets, MIN_SETS))]
        self._slots = [
            tuple(self._arena.place(value) for value in self._base[index % len(self._base)]) for index in range(sets)
        ]
        own = oracle.original(self._base[0], case.constants)
        self._outputs = [self._arena.reserve(leaf.shape, leaf.dtype) for leaf in own]
        self.rewrite()
        keywords, positional = constants_of(oracle.problem, case)
        calls = [PreparedCall(slots, keywords, positional, len(own)) for slots in self._slots]
        compiling = self.racer.execution is Execution.COMPILE
        limit = COMPILE_TIMEOUT_S if compiling else PREPARE_TIMEOUT_S[self._device]
        self.graphed = self.worker.prepare(calls, limit).graphed

    @property
    def worker(self) -> Worker:
        """The worker behind this lane."""
        assert self._worker is not None
        return self._worker

    @property
    def sets(self) -> int:
        """How many calls one run makes."""
        return len(self._slots)

    def rewrite(self, key: int | None = None) -> None:
        """New contents in every input slot: values scaled and rotated by secret amounts (or by `key`)."""
        generator = torch.Generator().manual_seed(secrets.randbits(62) if key is None else key)
        for index, slots in enumerate(self._slots):
            shift = int(torch.randint(len(self._base), (1,), generator=generator))
            for slot, value in zip(slots, self._base[(index + shift) % len(self._base)], strict=True):
                _refill(self._arena.tensor(slot), value, generator)

    def run(self) -> Sample:
        """One timed run of all sets on the contents that are there."""
        cuda = self._device == "cuda"
        if cuda:
            torch.cuda.synchronize()
        limit = PREPARE_TIMEOUT_S[self._device]
        if self.racer.name == CANDIDATE:
            return self.worker.time(1, limit, flush=cuda)
        try:
            return self.worker.time(1, limit, flush=cuda)
        except (KernelRaised, WorkerDied, WorkerTimeout, WorkerOutOfMemory) as error:
            raise MachineError(f"the process of the incumbent ({self.racer.name}) failed: {error}") from error

    def collect(self, index: int) -> tuple[Leaves, Question]:
        """What call `index` of the last run returned, and the question it had to answer."""
        for slot in self._outputs:
            self._arena.poison(slot)
        report = self.worker.collect(index, self._outputs)
        inputs = tuple(self._arena.tensor(slot) for slot in self._slots[index])
        question = Question(self._case, inputs, self._oracle.expect(self._case, inputs))
        check_report(report, question, exact_strides=self._oracle.problem.exact_strides)
        return tuple(self._arena.tensor(slot) for slot in self._outputs), question

    def output_key(self) -> int:
        """An integer digest of the output bits that were read last."""
        digest = hashlib.blake2b(b"".join(self._arena.digest(slot) for slot in self._outputs), digest_size=7)
        return int.from_bytes(digest.digest(), "little")

    def close(self) -> None:
        """Kill the process, give the memory back."""
        if self._worker is not None:
            self._worker.close()
        self._arena.close()


def _refill(target: torch.Tensor, value: torch.Tensor, generator: torch.Generator) -> None:
    """Write `value` into `target`, rotated along its longest leading dim, and scaled where it is floating."""
    scale = 0.75 + 0.25 * float(torch.rand((), generator=generator)) if value.is_floating_point() else None
    for axis in range(target.dim()):
        if target.stride(axis) == 0 and target.shape[axis] > 1:
            target, value = target.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    leading = list(range(max(1, target.dim() - 1))) if target.dim() else []
    axis = max(leading, key=lambda dim: target.shape[dim], default=-1)
    size = target.shape[axis] if leading else 0
    if size < 2:
        _write(target, value, scale)
        return
    shift = int(torch.randint(1, size, (1,), generator=generator))
    _write(target.narrow(axis, 0, shift), value.narrow(axis, size - shift, shift), scale)
    _write(target.narrow(axis, shift, size - shift), value.narrow(axis, 0, size - shift), scale)


def _write(target: torch.Tensor, value: torch.Tensor, scale: float | None) -> None:
    if scale is None:
        target.copy_(value)
    else:
        torch.mul(value, scale, out=target)


# ---------------------------------------------------------------------------------------------- pairs of processes


@dataclass(frozen=True)
class Pair:
    """The quads of one pair of processes: ln(A/B) of each, and the median seconds per call of both."""

    log_ratios: tuple[float, ...]
    a_seconds: float
    b_seconds: float

    @property
    def centre(self) -> float:
        """The median log-ratio."""
        return median(self.log_ratios)


def race(a: Lane, b: Lane, quads: int, *, examined: bool) -> Pair:
    """Interleave A B B A; `examined` reads back and compares secretly chosen outputs of B."""
    with _quiet_threads():
        return _race(a, b, quads, examined=examined)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """One thread for the judge's own tensors: idle OpenMP threads spin for milliseconds and would disturb the runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _race(a: Lane, b: Lane, quads: int, *, examined: bool) -> Pair:
    chosen = {quads - 1, secrets.randbelow(quads), secrets.randbelow(quads)} if examined else set()
    ratios: list[float] = []
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for quad in range(quads):
        first_a, first_b = _fresh_run(a), _fresh_run(b)
        second_b = _fresh_run(b)
        if quad in chosen:
            _examine(b, secrets.choice((b.sets - 1, secrets.randbelow(b.sets))))
        second_a = _fresh_run(a)
        samples[0].extend((first_a, second_a))
        samples[1].extend((first_b, second_b))
        by_device = all(sample.device_seconds for sample in (first_a, first_b, second_b, second_a))
        ratios.append(quad_log_ratio(*(_seconds(s, by_device) for s in (first_a, first_b, second_b, second_a))))
    if examined:
        _clocks_agree(*samples)
    per_a, per_b = (_per_call(lane, part) for lane, part in zip((a, b), samples, strict=True))
    return Pair(tuple(ratios), per_a, per_b)


def _fresh_run(lane: Lane) -> Sample:
    lane.rewrite()
    return lane.run()


def _seconds(sample: Sample, by_device: object) -> float:
    return sample.device_seconds if by_device and sample.device_seconds else sample.seconds


def _per_call(lane: Lane, samples: Sequence[Sample]) -> float:
    return median(_seconds(sample, sample.device_seconds) for sample in samples) / lane.sets


def _examine(lane: Lane, index: int) -> None:
    with candidate_failures("in the timed runs"):
        outputs, question = lane.collect(index)
    verify(outputs, question, "timed_outputs", Status.CHEAT)


def _clocks_agree(a: Sequence[Sample], b: Sequence[Sample]) -> None:
    """Device time is the worker's claim: what it says to save must show on the judge's own clock."""
    claims = [[s.device_seconds for s in part if s.device_seconds] for part in (a, b)]
    if not all(claims):
        return
    claimed = median(claims[0]) - median(claims[1])
    seen = median(s.seconds for s in a) - median(s.seconds for s in b)
    if claimed > 5e-5 and seen < CLOCK_AGREEMENT * claimed - 3e-5:
        said = f"claims to save {claimed * 1e6:.0f} µs of device time a run, the judge's clock sees {seen * 1e6:.0f} µs"
        raise Refusal(Status.CHEAT, said, "clock")


def challenge(lane: Lane) -> None:
    """Each link's inputs follow from the bits of the output before; each output is checked for its own inputs."""
    key = secrets.randbits(56)
    for _ in range(CHALLENGE_LINKS):
        lane.rewrite(key)
        with candidate_failures("in the challenge chain"):
            lane.run()
            outputs, question = lane.collect(secrets.randbelow(lane.sets))
        verify(outputs, question, "challenge_chain", Status.CHEAT)
        key ^= lane.output_key()


# ---------------------------------------------------------------------------------------------- the baseline


@dataclass
class Baseline:
    """What a candidate has to beat at one bench case: the incumbent's processes, kept open and reused."""

    case: Case
    eager: Racer
    incumbent: Racer
    sets: int
    eager_seconds: float
    eager_over_incumbent: float
    noise: float
    lanes: list[Lane] = field(default_factory=list)

    def close(self) -> None:
        """End all incumbent processes."""
        for lane in self.lanes:
            lane.close()
        self.lanes.clear()


def reference_racers(oracle: Oracle) -> tuple[Racer, Racer]:
    """PyTorch eager and torch.compile's artefact, in processes that no candidate ever touches."""
    text = oracle.problem.reference
    return (
        Racer("eager", text, "reference", Execution.PLAIN, trusted=True),
        Racer("compile", text, "reference", Execution.COMPILE, trusted=True),
    )


def kernel_racer(name: str, source: str, device: str) -> Racer:
    """A kernel file, called on the CPU as the spliced model would call it."""
    execution = Execution.OP if device == "cpu" else Execution.PLAIN
    return Racer(name, source, "kernel_fn", execution, trusted=False)


def measure_baseline(workshop: Workshop, oracle: Oracle, case: Case, incumbent: str | None) -> Baseline:
    """Find the incumbent (the given source, or the faster of eager and compile) and its noise between processes."""
    eager, compiled = reference_racers(oracle)
    sets = _set_count(workshop, oracle, case, eager)
    quads = BASELINE_QUADS[workshop.device]
    rival = kernel_racer("kept", incumbent, workshop.device) if incumbent is not None else compiled
    with ExitStack() as stack:
        plain = Lane(workshop, oracle, eager, case, sets)
        stack.callback(plain.close)
        other = _try_lane(workshop, oracle, rival, case, sets)
        if other is None:
            pair, winner = race(plain, plain, quads, examined=False), plain
        else:
            stack.callback(other.close)
            pair = race(plain, other, quads, examined=False)
            winner = other if incumbent is not None or pair.centre > 0 else plain
        lanes = [winner]
        for _ in range(PROCESS_PAIRS - 1):
            lanes.append(Lane(workshop, oracle, winner.racer, case, sets))
            stack.callback(lanes[-1].close)
        noise = process_noise([race(a, b, quads, examined=False).centre for a, b in pairwise(lanes)])
        ratio = math.exp(pair.centre) if winner is not plain else 1.0
        if winner is not plain:
            plain.close()
        elif other is not None:
            other.close()
        stack.pop_all()
    return Baseline(case, eager, winner.racer, sets, pair.a_seconds, ratio, noise, lanes)


def _try_lane(workshop: Workshop, oracle: Oracle, racer: Racer, case: Case, sets: int) -> Lane | None:
    """None where torch.compile cannot handle the reference; a kept kernel must still run."""
    try:
        return Lane(workshop, oracle, racer, case, sets)
    except (KernelRaised, WorkerDied, WorkerTimeout) as error:
        if racer.name == "kept":
            raise Refusal(
                Status.ENVIRONMENT, f"the kept kernel no longer runs: {error}", "incumbent", Blame.ENVIRONMENT
            ) from error
        return None


def _set_count(workshop: Workshop, oracle: Oracle, case: Case, eager: Racer) -> int:
    """Enough calls for RUN_SECONDS of work, within memory."""
    device = workshop.device
    fitting = max(2, MAX_SET_BYTES[device] // max(1, input_bytes(case)))
    probe = Lane(workshop, oracle, eager, case, 2)
    try:
        probe.run()
        seconds = min(_per_call(probe, [_fresh_run(probe)]) for _ in range(3))
    finally:
        probe.close()
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

    baseline: Baseline
    interval: Interval
    pairs: tuple[Pair, ...]
    peak_memory_mb: float | None


def run_benchmark(workshop: Workshop, oracle: Oracle, baselines: Sequence[Baseline], request: JudgeRequest) -> Outcome:
    """Race the candidate against every baseline; raises Refusal where a timed output or a clock is wrong."""
    noisy = [baseline for baseline in baselines if baseline.noise > MAX_NOISE]
    if noisy:
        raise Refusal(
            Status.ENVIRONMENT,
            f"unreliable: identical processes differ by {noisy[0].noise:.0%} on {noisy[0].case.name}",
            "unreliable",
            Blame.ENVIRONMENT,
        )
    candidate = kernel_racer(CANDIDATE, request.source, workshop.device)
    results = [_race_case(workshop, oracle, baseline, candidate, request) for baseline in baselines]
    return _decide(results, request, oracle)


def _race_case(
    workshop: Workshop, oracle: Oracle, baseline: Baseline, candidate: Racer, request: JudgeRequest
) -> CaseResult:
    pairs: list[Pair] = []
    needed = bar(request.min_gain, baseline.noise)
    headroom = 1.3 if workshop.device == "cpu" else 1.05
    peak: float | None = None
    wanted = PROCESS_PAIRS
    while len(pairs) < wanted:
        with candidate_failures("in the timed runs"):
            lane = Lane(workshop, oracle, candidate, baseline.case, baseline.sets)
        try:
            with candidate_failures("in the timed runs"):
                pairs.append(
                    race(baseline.lanes[len(pairs) % len(baseline.lanes)], lane, QUADS[workshop.device], examined=True)
                )
            hopeless = math.exp(pairs[-1].centre) * headroom < needed
            if not hopeless and len(pairs) >= wanted:
                challenge(lane)
            peak = lane.worker.peak_memory_mb
        finally:
            lane.close()
        if hopeless:
            break
        if len(pairs) == PROCESS_PAIRS and math.exp(fmean(p.centre for p in pairs)) > REJUDGE_ABOVE:
            wanted = PROCESS_PAIRS + 1  # a jump this large is measured once more, in a process of its own
    _above_floor(oracle, baseline.case, pairs)
    interval = clustered_interval([pair.log_ratios for pair in pairs], trials=request.trials)
    return CaseResult(baseline, interval, tuple(pairs), peak)


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


def _decide(results: Sequence[CaseResult], request: JudgeRequest, oracle: Oracle) -> Outcome:
    together = geometric_mean([result.interval for result in results])
    noise = max(result.baseline.noise for result in results)
    needed = bar(request.min_gain, noise)
    enough = all(len(result.pairs) >= PROCESS_PAIRS for result in results)
    consistent = all(pair.centre > 0 for result in results for pair in result.pairs)
    no_loss = all(result.interval.high > 1 for result in results)
    keep = together.low > needed and enough and consistent and no_loss
    timing = _timing(results, together, noise, oracle)
    interval = f"interval {together.low:.3g} to {together.high:.3g}"
    said = f"{together.ratio:.3g} times the incumbent ({timing.incumbent}), {interval}"
    reason = "" if keep else f"; a keep needs the lower bound above {needed:.3g}"
    return Outcome(Status.KEEP if keep else Status.DISCARD, said + reason, timing)


def _timing(results: Sequence[CaseResult], together: Interval, noise: float, oracle: Oracle) -> Timing:
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
        peak_memory_mb=max((result.peak_memory_mb or 0.0 for result in results), default=0.0) or None,
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

"""Lanes: processes that run one kernel over rotated input sets, and races between two of them, A B B A.

Every timed call sees values that nobody has seen before, and what it returned is read back and compared, so a cache,
a skipped tail or work left to a thread shows as a wrong output. The clock is the judge's own, around the round trip;
a GPU worker's claim of device time must agree with it. Not protected against: a machine whose own speed changes
within one quad (the noise between processes of the incumbent raises the bar instead).
"""

import hashlib
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from harness.arena import Arena, Slot
from harness.errors import MachineError
from harness.intervals import quad_log_ratio
from harness.oracle import Oracle, Question
from harness.problem import Case
from harness.records import Status
from harness.stages import (
    COMPILE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    PREPARE_TIMEOUT_S,
    Refusal,
    candidate_failures,
    check_report,
    constants_of,
    settle,
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

MAX_BASES = 4
CHALLENGE_LINKS = 4
RUNS_PER_POSITION = {"cpu": 5, "cuda": 1}
RACE_SECONDS = 4.0
MIN_QUADS = 3
POSITION_SECONDS = 0.3
"""On a busy machine a race is cut short, not waited for: the interval is wider then."""
READ_BACK_ROUNDS = 5
READ_BACK_TRIES = 3
READ_BACK_SHARE = 0.5
EXAMINE_ONE_IN = {"cpu": 1, "cuda": 3}
"""How often a timed run is read back and compared, at secret times: on a GPU that takes longer than the run."""
CLOCK_REPLAYS, CLOCK_ROUNDS = 20, 3
CLOCK_SECONDS = 0.01
CLOCK_SHARE, CLOCK_SLACK_S = 0.1, 5e-4
"""How much of its claimed device time, or how many seconds, a candidate may leave unexplained on the judge's clock."""

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
    """One process of one racer with its own arena; `take` makes it ready to run a bench case over some input sets."""

    def __init__(self, workshop: Workshop, oracle: Oracle, racer: Racer, nbytes: int, seed: Path | None = None) -> None:
        self.racer = racer
        self._oracle, self._device = oracle, workshop.device
        self._case: Case | None = None
        self._slots: list[tuple[Slot, ...]] = []
        self._arena = Arena(workshop.device, nbytes)
        self._worker: Worker | None = None
        try:
            self._worker = workshop.open(
                racer.source,
                self._arena,
                entry=racer.entry,
                execution=racer.execution,
                trusted=racer.trusted,
                seed=seed,
            )
            self._worker.load(LOAD_TIMEOUT_S[self._device])
        except BaseException:
            self.close()
            raise

    def take(self, case: Case, sets: int) -> None:
        """Lay out `sets` input sets of `case` and have the worker prepare its calls; nothing to do when it has."""
        if self._case is case and len(self._slots) == sets:
            return
        oracle = self._oracle
        self._case = case
        self._arena.reset()
        self._base = [oracle.draw(case) for _ in range(min(sets, MAX_BASES))]
        self._fixed = [draw.fixed for draw in case.inputs]
        self._slots = [
            tuple(self._arena.place(value) for value in self._base[index % len(self._base)]) for index in range(sets)
        ]
        own = oracle.original(self._base[0], case.constants)
        self._outputs = [self._arena.reserve(leaf.shape, leaf.dtype) for leaf in own]
        self.rewrite()
        keywords, positional = constants_of(oracle.problem, case)
        calls = [PreparedCall(slots, keywords, positional, len(own)) for slots in self._slots]
        compiling = self.racer.execution is Execution.COMPILE
        settle(self._device)
        self.worker.prepare(calls, COMPILE_TIMEOUT_S if compiling else PREPARE_TIMEOUT_S[self._device])

    @property
    def worker(self) -> Worker:
        """The worker behind this lane."""
        assert self._worker is not None
        return self._worker

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._device

    @property
    def sets(self) -> int:
        """How many calls one run makes."""
        return len(self._slots)

    def rewrite(self, key: int | None = None) -> None:
        """New contents in every input slot: values scaled and rotated by secret amounts (or by `key`)."""
        generator = torch.Generator().manual_seed(secrets.randbits(62) if key is None else key)
        for index, slots in enumerate(self._slots):
            shift = int(torch.randint(len(self._base), (1,), generator=generator))
            values = self._base[(index + shift) % len(self._base)]
            for slot, value, fixed in zip(slots, values, self._fixed, strict=True):
                if not fixed:
                    _refill(self._arena.tensor(slot), value, generator)

    def run(self, repeats: int = 1) -> Sample:
        """Timed runs of all sets on the contents that are there."""
        cuda = self._device == "cuda"
        settle(self._device)
        limit = PREPARE_TIMEOUT_S[self._device]
        if self.racer.name == CANDIDATE:
            return self.worker.time(repeats, limit, flush=cuda)
        try:
            return self.worker.time(repeats, limit, flush=cuda)
        except (KernelRaised, WorkerDied, WorkerTimeout, WorkerOutOfMemory) as error:
            raise MachineError(f"the process of the incumbent ({self.racer.name}) failed: {error}") from error

    def pause(self) -> None:
        """Stop all processes of this lane, so that none of them works, or disturbs, while the other lane is timed."""
        for pid in _tree_of(self.worker.guard_pid):
            _send(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        for pid in _tree_of(self.worker.guard_pid):
            _send(pid, signal.SIGCONT)

    def run_and_read(self) -> float:
        """Seconds from the start of a run on fresh contents until every output has been read back."""
        self.rewrite()
        settle(self._device)
        begin = time.perf_counter()
        self.run()
        for index in range(self.sets):
            self.worker.collect(index, self._outputs)
        return time.perf_counter() - begin

    def collect(self, index: int) -> tuple[Leaves, Question]:
        """What call `index` of the last run returned, and the question it had to answer.

        The inputs are overwritten before the output is asked for: whoever computes only now computes something else.
        """
        inputs = tuple(self._arena.tensor(slot).clone() for slot in self._slots[index])
        self.rewrite()
        for slot in self._outputs:
            self._arena.poison(slot)
        settle(self._device)
        report = self.worker.collect(index, self._outputs)
        assert self._case is not None
        question = Question(self._case, inputs, self._oracle.expect(self._case, inputs, draws=1))
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


def _tree_of(root: int) -> list[int]:
    """All descendants of a process, from /proc (psutil looks at every process of the machine: 5 ms)."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        for task in _listed(Path(f"/proc/{waiting.pop()}/task")):
            children = _text(task / "children")
            found += (fresh := [int(word) for word in children.split()])
            waiting += fresh
    return found


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):  # the process has ended
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):  # the thread has ended
        return path.read_text()
    return ""


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


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


@contextmanager
def _alone(runner: Lane, other: Lane) -> Iterator[None]:
    """Everything of the other lane stands still; on a GPU its processes hold no work, and stopping costs more."""
    if runner is other or runner.device == "cuda":
        yield
        return
    other.pause()
    try:
        yield
    finally:
        other.resume()


def _race(a: Lane, b: Lane, quads: int, *, examined: bool) -> Pair:
    ratios: list[float] = []
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    begin, seen = time.monotonic(), 0
    for quad in range(quads):
        if quad >= MIN_QUADS and time.monotonic() - begin > RACE_SECONDS:
            break
        with _alone(a, b):
            first_a = best_run(a)
        looked = examined and not secrets.randbelow(EXAMINE_ONE_IN[b.device])
        seen += looked
        with _alone(b, a):
            first_b = best_run(b)
            second_b = best_run(b, examined=looked)
        with _alone(a, b):
            second_a = best_run(a)
        samples[0].extend((first_a, second_a))
        samples[1].extend((first_b, second_b))
        by_device = all(sample.device_seconds for sample in (first_a, first_b, second_b, second_a))
        ratios.append(quad_log_ratio(*(_seconds(s, by_device) for s in (first_a, first_b, second_b, second_a))))
    if examined:
        if not seen:
            best_run(b, examined=True)
        _clocks_agree(a, b, median(_seconds(sample, sample.device_seconds) for sample in samples[1]))
    per_a, per_b = (per_call(lane, part) for lane, part in zip((a, b), samples, strict=True))
    return Pair(tuple(ratios), per_a, per_b)


def fresh_run(lane: Lane) -> Sample:
    """One timed run on contents that nobody has seen."""
    lane.rewrite()
    return lane.run()


def best_run(lane: Lane, *, examined: bool = False) -> Sample:
    """The fastest of a few fresh runs: on a shared CPU whatever else runs only ever adds time.

    `examined` reads an output back after a secretly chosen one of them, so that none of them can be skipped.
    """
    runs = RUNS_PER_POSITION[lane.device]
    chosen = secrets.randbelow(runs)
    best: Sample | None = None
    begin = time.monotonic()
    for number in range(runs):
        late = best is not None and time.monotonic() - begin > POSITION_SECONDS
        if late and not (examined and number <= chosen):
            break
        sample = fresh_run(lane)
        if examined and number == chosen:
            _examine(lane, secrets.choice((lane.sets - 1, secrets.randbelow(lane.sets))))
        if best is None or sample.seconds < best.seconds:
            best = sample
    assert best is not None
    return best


def _seconds(sample: Sample, by_device: object) -> float:
    return sample.device_seconds if by_device and sample.device_seconds else sample.seconds


def per_call(lane: Lane, samples: Sequence[Sample]) -> float:
    """Median seconds of one call over some runs."""
    return median(_seconds(sample, sample.device_seconds) for sample in samples) / lane.sets


def _examine(lane: Lane, index: int) -> None:
    with candidate_failures("in the timed runs"):
        outputs, question = lane.collect(index)
    verify(outputs, question, "timed_outputs", Status.CHEAT)


def _clocks_agree(a: Lane, b: Lane, seconds: float) -> None:
    """Device time is the worker's claim: on many replays at once it must leave no more unexplained than A's does.

    Replaying often makes the round trip weigh little (a run takes about `seconds`); what flushing and launching cost is
    the same for both.
    """
    if a.device != "cuda":
        return
    unexplained: tuple[list[float], list[float]] = ([], [])
    claimed = 0.0
    replays = min(CLOCK_REPLAYS, max(4, round(CLOCK_SECONDS / max(seconds, 1e-6))))
    for _ in range(CLOCK_ROUNDS):
        for lane, kept in zip((a, b), unexplained, strict=True):
            lane.rewrite()
            sample = lane.run(replays)
            claimed = sample.device_seconds or sample.seconds
            kept.append(sample.seconds - claimed)
    hidden = median(unexplained[1]) - median(unexplained[0])
    if hidden > max(CLOCK_SHARE * claimed, CLOCK_SLACK_S):
        said = f"{hidden * 1e3:.2f} ms of {replays} runs pass on the judge's clock and in no device time claimed"
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


def show_the_work(a: Lane, b: Lane, pair: Pair) -> None:
    """What B saves by the clock of the timed runs must also be saved when every output is read back at once.

    Work that a run leaves for later (a thread, a patched worker that computes when it is asked) shows here.
    """
    totals: tuple[list[float], list[float]] = ([], [])
    least = math.inf
    for attempt in range(READ_BACK_TRIES):
        if attempt:  # what was claimed may itself have been a busy moment of the other process
            pair = race(a, b, MIN_QUADS, examined=False)
        least = min(least, (pair.a_seconds - pair.b_seconds) * b.sets)
        claimed = least
        if claimed <= 0:
            return
        with _quiet_threads():
            _read_back(a, b, totals)
        # the fastest of many: a busy machine only adds time, and must not turn an honest kernel into a cheat
        saved = min(totals[0]) - min(totals[1])
        if saved >= READ_BACK_SHARE * claimed - max(1e-3, 0.25 * min(totals[0])):
            return
    said = f"saves {claimed * 1e3:.2f} ms a run, but {saved * 1e3:.2f} ms until its outputs are there"
    raise Refusal(Status.CHEAT, said, "deferred_work")


def _read_back(a: Lane, b: Lane, totals: tuple[list[float], list[float]]) -> None:
    for _ in range(READ_BACK_ROUNDS):
        with _alone(a, b):
            totals[0].append(a.run_and_read())
        with _alone(b, a), candidate_failures("when all outputs were read back"):
            totals[1].append(b.run_and_read())

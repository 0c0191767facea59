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
from enum import Enum, auto
from pathlib import Path
from statistics import median

import torch

from harness.arena import Arena, Slot, extent
from harness.census import tree_of
from harness.compare import roughly_equal
from harness.errors import MachineError
from harness.fresh_values import FreshValues
from harness.intervals import quad_log_ratio
from harness.oracle import Oracle, Question
from harness.problem import Case
from harness.process_memory import NoSuchMemory
from harness.records import Role, Status
from harness.stages import (
    COMPILE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    PREPARE_TIMEOUT_S,
    Refusal,
    candidate_failures,
    check_report,
    check_shared,
    constants_of,
    same_bits,
    settle,
    verify,
)
from harness.truth import Leaves
from harness.worker import device_memory
from harness.workshop import (
    CallReport,
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
READ_BACK_SLACK_S, READ_BACK_SLACK = {"cpu": 1e-3, "cuda": 1e-4}, {"cpu": 0.25, "cuda": 0.05}
"""What the clock may miss: so many seconds, or this share of the time that reading everything back takes."""
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
        self._keys: list[int] = []
        self._packs = False
        self.prepack_seconds: list[float] = []
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
        bases = [oracle.draw(case) for _ in range(min(sets, MAX_BASES))]
        self._fresh = FreshValues(bases, [place for place, draw in enumerate(case.inputs) if draw.fixed])
        self._slots = [tuple(self._arena.place(value) for value in bases[index % len(bases)]) for index in range(sets)]
        own = oracle.original(bases[0], case.constants)
        self._outputs = [self._arena.reserve(leaf.shape, leaf.dtype) for leaf in own]
        self._own_extents = [extent(leaf.shape, leaf.stride()) * leaf.element_size() for leaf in own]
        self._weights = [place for place, draw in enumerate(case.inputs) if draw.role is Role.WEIGHT]
        self._packs = self._prepack(0, forget=True)
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
        """New contents in every input slot, from a secret key or from `key`; weights first, and packed where asked."""
        first = secrets.randbits(61) if key is None else key
        self._keys = [first + index for index in range(self.sets)]
        everything = range(len(self._slots[0]))
        if not self._packs:
            self._fill(everything)
            return
        self._fill(self._weights)
        for index in range(self.sets):
            self._prepack(index)
        self._fill([place for place in everything if place not in self._weights])

    def _fill(self, places: Sequence[int]) -> None:
        for slots, key in zip(self._slots, self._keys, strict=True):
            self._fresh.fill([self._arena.tensor(slot) for slot in slots], key, places)

    def _prepack(self, index: int, *, forget: bool = False) -> bool:
        """Have the weights of one set packed, untimed; False when the file declares no `prepack`."""
        weights = [self._slots[index][place] for place in self._weights]
        if not weights or self.racer.execution is Execution.COMPILE:
            return False
        with self._blamed():
            seconds = self.worker.prepack(weights, PREPARE_TIMEOUT_S[self._device], forget=forget)
        if seconds is not None:
            self.prepack_seconds.append(seconds)
        return seconds is not None

    def run(self, repeats: int = 1) -> Sample:
        """Timed runs of all sets on the contents that are there."""
        cuda = self._device == "cuda"
        settle(self._device)
        if cuda:
            device_memory.reset_persisting_cache()
        with self._blamed():
            return self.worker.time(repeats, PREPARE_TIMEOUT_S[self._device], flush=cuda)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """What goes wrong in a process of ours is the machine's fault, not the candidate's."""
        try:
            yield
        except (KernelRaised, WorkerDied, WorkerTimeout, WorkerOutOfMemory) as error:
            if self.racer.name == CANDIDATE:
                raise
            raise MachineError(f"the process of the incumbent ({self.racer.name}) failed: {error}") from error

    def pause(self) -> None:
        """Stop all processes of this lane, so that none of them works, or disturbs, while the other lane is timed."""
        stopped: set[int] = set()
        while fresh := set(tree_of(self.worker.guard_pid)) - stopped:  # one may have been born while others stopped
            for pid in fresh:
                _send(pid, signal.SIGSTOP)
            stopped |= fresh

    def resume(self) -> None:
        """Let them run again."""
        for pid in tree_of(self.worker.guard_pid):
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

    def held(self, sample: Sample, indices: Sequence[int]) -> list["Held"]:
        """What some calls of the run just made returned: as it lies in the worker's memory, then as it is handed over.

        The inputs are overwritten between the two: whoever computes only now computes something else.
        """
        keys = [self._keys[index] for index in indices]
        seen = [self._peek(sample, index) for index in indices]
        self.rewrite()
        return [self._handed_over(index, key, memory) for index, key, memory in zip(indices, keys, seen, strict=True)]

    def _peek(self, sample: Sample, index: int) -> tuple[torch.Tensor, ...] | None:
        """The bytes of the outputs of one call, read without the worker's help (CPU); None where that cannot be."""
        if self._device != "cpu" or not self.worker.visible:
            return None
        try:
            addresses = sample.addresses[index]
            found = [self.worker.peek(at, nbytes) for at, nbytes in zip(addresses, self._own_extents, strict=True)]
        except (NoSuchMemory, ValueError, IndexError) as error:
            raise Refusal(
                Status.CHEAT, f"its outputs are not where it says they are: {error}", "deferred_work"
            ) from error
        return None if any(piece is None for piece in found) else tuple(piece for piece in found if piece is not None)

    def _handed_over(self, index: int, key: int, seen: tuple[torch.Tensor, ...] | None) -> "Held":
        for slot in self._outputs:
            self._arena.poison(slot)
        settle(self._device)
        report = self.worker.collect(index, self._outputs)
        return Held(key, seen, report, tuple(self._arena.tensor(slot).clone() for slot in self._outputs))

    def question(self, held: "Held") -> Question:
        """The question that a held output had to answer, its inputs made again."""
        assert self._case is not None
        inputs = self._fresh.again(held.key)
        return Question(self._case, inputs, self._oracle.expect(self._case, inputs, draws=1))

    def original(self, held: "Held") -> Leaves:
        """The original's own answer to it: cheaper than a whole question."""
        assert self._case is not None
        return self._oracle.original(self._fresh.again(held.key), self._case.constants)

    @property
    def exact_strides(self) -> bool:
        """Whether outputs must lie in memory as the original's do."""
        return self._oracle.problem.exact_strides

    def output_key(self) -> int:
        """An integer digest of the output bits that were read last."""
        digest = hashlib.blake2b(b"".join(self._arena.digest(slot) for slot in self._outputs), digest_size=7)
        return int.from_bytes(digest.digest(), "little")

    def close(self) -> None:
        """Kill the process, give the memory back."""
        if self._worker is not None:
            self._worker.close()
        self._arena.close()


@dataclass(frozen=True)
class Held:
    """One output of a timed run: the key of its inputs, its bytes as the clock stopped, and as it was handed over."""

    key: int
    seen: tuple[torch.Tensor, ...] | None
    report: CallReport
    outputs: Leaves


# ---------------------------------------------------------------------------------------------- pairs of processes


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
    begin = time.monotonic()
    whole = secrets.randbelow(quads)
    for quad in range(quads):
        if quad >= MIN_QUADS and time.monotonic() - begin > RACE_SECONDS:
            break
        looks = _looks(b.device, whole=quad == whole) if examined else (Look.NOT, Look.NOT)
        with _alone(a, b):
            first_a = best_run(a)
        with _alone(b, a):
            first_b = best_run(b, looks[0])
            second_b = best_run(b, looks[1])
        with _alone(a, b):
            second_a = best_run(a)
        samples[0].extend((first_a, second_a))
        samples[1].extend((first_b, second_b))
        by_device = all(sample.device_seconds for sample in (first_a, first_b, second_b, second_a))
        ratios.append(quad_log_ratio(*(_seconds(s, by_device) for s in (first_a, first_b, second_b, second_a))))
    if examined:
        if whole >= len(ratios):  # cut short before its turn
            best_run(b, Look.ALL)
        _clocks_agree(a, b, median(_seconds(sample, sample.device_seconds) for sample in samples[1]))
    per_a, per_b = (per_call(lane, part) for lane, part in zip((a, b), samples, strict=True))
    return Pair(tuple(ratios), per_a, per_b)


def fresh_run(lane: Lane) -> Sample:
    """One timed run on contents that nobody has seen."""
    lane.rewrite()
    return lane.run()


class Look(Enum):
    """What is read back of the runs at one position: nothing, one call of the run that counts, or every call of one."""

    NOT = auto()
    ONE = auto()
    ALL = auto()


def _looks(device: str, *, whole: bool) -> tuple[Look, Look]:
    """Which of B's two positions is looked at is secret."""
    spared = secrets.randbelow(EXAMINE_ONE_IN[device])
    look = Look.ALL if whole or device == "cpu" else Look.NOT if spared else Look.ONE
    return (look, Look.NOT) if secrets.randbelow(2) else (Look.NOT, look)


def best_run(lane: Lane, look: Look = Look.NOT) -> Sample:
    """The fastest of a few fresh runs: on a shared CPU whatever else runs only ever adds time.

    The run that counts is the one that is read back, so a run that skipped something, however rare, does not pay.
    """
    best: Sample | None = None
    held: list[Held] = []
    begin = time.monotonic()
    for _ in range(RUNS_PER_POSITION[lane.device]):
        if best is not None and time.monotonic() - begin > POSITION_SECONDS:
            break
        sample = fresh_run(lane)
        if best is None or sample.seconds < best.seconds:
            best = sample
            if look is not Look.NOT:
                with candidate_failures("in the timed runs"):
                    held = lane.held(sample, _chosen(lane.sets, look))
    assert best is not None
    _examine(lane, held)
    return best


def _chosen(sets: int, look: Look) -> list[int]:
    """In a secret order: the last call is where work would be left over most easily."""
    if look is Look.ONE:
        return [secrets.choice((sets - 1, secrets.randbelow(sets)))]
    return secrets.SystemRandom().sample(range(sets), sets)


def _seconds(sample: Sample, by_device: object) -> float:
    return sample.device_seconds if by_device and sample.device_seconds else sample.seconds


def per_call(lane: Lane, samples: Sequence[Sample]) -> float:
    """Median seconds of one call over some runs."""
    return median(_seconds(sample, sample.device_seconds) for sample in samples) / lane.sets


def _examine(lane: Lane, held: Sequence[Held]) -> None:
    """The first one against truth, the others roughly: who skips a call is far off."""
    for one in held[:1]:
        _same_as_seen(one)
        question = lane.question(one)
        check_report(one.report, question, exact_strides=lane.exact_strides)
        verify(one.outputs, question, "timed_outputs", Status.CHEAT)
    for one in held[1:]:
        _same_as_seen(one)
        if not roughly_equal(one.outputs, lane.original(one)):
            raise Refusal(Status.CHEAT, "some call of a timed run was answered wrongly", "timed_outputs")


def _same_as_seen(held: Held) -> None:
    """What was handed over must be what lay there as the clock stopped."""
    check_shared(held.report, "the timed runs")
    if held.seen is None:
        return
    said = "what it returned was not there yet when the clock stopped"
    if len(held.report.outputs) != len(held.seen):
        raise Refusal(Status.CHEAT, said, "deferred_work")
    for output, leaf, seen in zip(held.report.outputs, held.outputs, held.seen, strict=True):
        laid = _laid_out(seen.view(leaf.dtype), output.shape, output.stride)
        if laid is None or laid.shape != leaf.shape or not same_bits(laid, leaf):
            raise Refusal(Status.CHEAT, said, "deferred_work")


def _laid_out(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor | None:
    """These elements in that layout, contiguous; None where they do not fit it."""
    if len(shape) != len(stride) or min((*shape, *stride), default=0) < 0 or extent(shape, stride) != flat.numel():
        return None
    return flat.as_strided(shape, stride).contiguous()


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
        with candidate_failures("in the challenge chain"):
            lane.rewrite(key)
            held = lane.held(lane.run(), [secrets.randbelow(lane.sets)])[0]
        _same_as_seen(held)
        verify(held.outputs, lane.question(held), "challenge_chain", Status.CHEAT)
        key ^= lane.output_key()


def show_the_work(a: Lane, b: Lane, pair: Pair) -> None:
    """What B saves by the clock of the timed runs must also be saved when every output is read back at once.

    Work that a run leaves for later (a thread, a patched worker that computes when it is asked) shows here. Where the
    worker's memory was read as the clock stopped there is nothing left to show.
    """
    if b.device == "cpu" and b.worker.visible:
        return
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
        slack = max(READ_BACK_SLACK_S[b.device], READ_BACK_SLACK[b.device] * min(totals[0]))
        if saved >= READ_BACK_SHARE * claimed - slack:
            return
    said = f"saves {claimed * 1e3:.2f} ms a run, but {saved * 1e3:.2f} ms until its outputs are there"
    raise Refusal(Status.CHEAT, said, "deferred_work")


def _read_back(a: Lane, b: Lane, totals: tuple[list[float], list[float]]) -> None:
    for _ in range(READ_BACK_ROUNDS):
        with _alone(a, b):
            totals[0].append(a.run_and_read())
        with _alone(b, a), candidate_failures("when all outputs were read back"):
            totals[1].append(b.run_and_read())

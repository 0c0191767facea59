"""The five stages: one candidate in one worker, case after case, until something is wrong.

A candidate's failure is a `Refusal`, caught in one place (harness/judge.py), which turns it into a verdict. What is
not checked here: speed, and what happens between timed calls (harness/benchmark.py).
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from harness.arena import Arena, Slot, extent
from harness.census import busy_seconds
from harness.compare import Expected, compare_all
from harness.errors import OursError
from harness.oracle import Oracle, Question, ReferenceRefusal
from harness.problem import Case, Problem, itemsize
from harness.records import Blame, Role, Scalar, StageName, StageResult, StageStatus, Status
from harness.statics import KernelFile
from harness.truth import Leaves
from harness.workshop import (
    CallReport,
    Execution,
    KernelRaised,
    OutputReport,
    PreparedCall,
    Worker,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
    Workshop,
)

LOAD_TIMEOUT_S = {"cpu": 60.0, "cuda": 120.0}
SLOW_BUILDERS, COMPILED_CALL_TIMEOUT_S = ("torch.compile", "load_inline"), {"cpu": 180.0, "cuda": 180.0}
"""A file that names one of these may take long to answer: Inductor alone takes 20 s to come up, and compiles anew for
other layouts."""
FIRST_CALL_TIMEOUT_S = {"cpu": 30.0, "cuda": 120.0}
CALL_TIMEOUT_S = {"cpu": 15.0, "cuda": 60.0}  # on a GPU each new shape may be compiled or autotuned
PREPARE_TIMEOUT_S = {"cpu": 30.0, "cuda": 120.0}
COMPILE_TIMEOUT_S = 240.0
DETERMINISM_CALLS = 3
TWINS, FEW_ELEMENTS = {"cpu": 8, "cuda": 3}, 1 << 16
"""How often one element of a small input is changed: a digest of every second one misses each with a chance of ½."""
CALLS_IN_A_ROW = 4
MANY_CALLS, FEW_BYTES = {"cpu": 40, "cuda": 8}, 1 << 23
"""So many calls more, at most, where inputs are small: how many buffers a kernel would need is not to be guessed."""
ARENA_SLACK = 1 << 26
REST_S, SPIN_S, IDLE_WINDOWS_S, BUSY_SHARE = 1.0, 0.02, (0.1, 0.2), 0.3
"""A process of the kernel's has REST_S to end; the worker is busy when it takes BUSY_SHARE of a core in all windows."""

FIVE_STAGES = (StageName.SMOKE, StageName.SHAPES, StageName.STABILITY, StageName.DETERMINISM, StageName.EDGE)


class Refusal(Exception):  # noqa: N818 - a flow exception: why a candidate is not accepted
    """One reason to refuse, with whose fault it is; `stage` None means the stage that was running."""

    def __init__(
        self,
        status: Status,
        detail: str,
        guard: str | None = None,
        blame: Blame = Blame.CANDIDATE,
        stage: StageName | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.guard, self.blame, self.stage = status, detail, guard, blame, stage


@dataclass
class Progress:
    """Which stages ended how; the one running now is `current`."""

    emit: Callable[[str, dict[str, object]], None]
    results: dict[StageName, StageResult] = field(default_factory=dict)
    current: StageName = StageName.SMOKE

    @contextmanager
    def stage(self, name: StageName) -> Iterator[list[str]]:
        """Time a stage and record its end; lines added to the yielded list become its detail."""
        self.current = name
        notes: list[str] = []
        begin = time.perf_counter()
        self.emit("stage", {"stage": name.value, "status": "running"})
        try:
            yield notes
        except Refusal as refusal:
            self._end(refusal.stage or name, StageStatus.FAIL, begin, refusal.detail)
            raise
        self._end(name, StageStatus.PASS, begin, "; ".join(notes))

    def _end(self, name: StageName, status: StageStatus, begin: float, detail: str) -> None:
        before = self.results[name].seconds if name in self.results else 0.0
        self.results[name] = StageResult(status, round(before + time.perf_counter() - begin, 4), detail)
        self.emit("stage", {"stage": name.value, "status": status.value, "detail": detail})


@contextmanager
def candidate_failures(what: str) -> Iterator[None]:
    """Turn what happened in a candidate's worker into the refusal it is."""
    try:
        yield
    except KernelRaised as error:
        raise Refusal(
            Status.CRASH, f"raised {_first_line(error.type_name)[:80]} {what}: {_first_line(error.message)}"
        ) from error
    except WorkerTimeout as error:
        raise Refusal(Status.TIMEOUT, f"did not finish {what}: {error}") from error
    except WorkerOutOfMemory as error:
        raise Refusal(Status.CRASH, f"ran out of memory {what}: {_first_line(str(error))}") from error
    except WorkerDied as error:
        raise Refusal(Status.CRASH, f"died {what}: {error}") from error


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "(no message)"


class Examinee:
    """One candidate in one fresh worker with an arena of its own; closes both."""

    def __init__(
        self,
        workshop: Workshop,
        oracle: Oracle,
        source: str,
        nbytes: int,
        execution: Execution = Execution.PLAIN,
        *,
        seed: Path | None = None,
        gate: AbstractContextManager[object] | None = None,
    ) -> None:
        """`gate` is held whenever the judge computes: of two examinees at work, one at a time may use the oracle."""
        self.problem: Problem = oracle.problem
        self.gate = gate or nullcontext()
        self.arena = Arena(workshop.device, nbytes)
        try:
            self.worker: Worker = workshop.open(source, self.arena, execution=execution, seed=seed)
        except BaseException:
            self.arena.close()
            raise
        self._device = workshop.device
        self._called = False
        self.compiles = any(word in source for word in SLOW_BUILDERS)
        self.packs = True  # until the file turns out to declare no prepack
        self.answers = 0
        self.kept: list[str] = []  # the cases whose output the kernel did not let go of

    def load(self) -> None:
        """Import the file."""
        with candidate_failures("while its file was imported"):
            self.worker.load(LOAD_TIMEOUT_S[self._device])

    def answer(self, question: Question) -> Leaves:
        """The candidate's outputs for a question, as views of the arena that live until the next call."""
        with self.gate:
            self.arena.reset()
        placed = self.place(question)
        with self.gate:
            before = [self.arena.digest(slot) for slot in placed]
            slots = self.reserve(question.expected)
            self.arena.poison_margins()
            margins = self.arena.margins_digest()
        settle(self._device)
        keywords, positional = constants_of(self.problem, question.case)
        usual = CALL_TIMEOUT_S if self._called else FIRST_CALL_TIMEOUT_S
        limit = (COMPILED_CALL_TIMEOUT_S if self.compiles else usual)[self._device]
        with candidate_failures(f"on {question.case.name}"):
            report = self.worker.call(placed, keywords, slots, limit, positional=positional)
        self._called = True
        with self.gate:
            self._untouched(question, placed, before, margins)
        check_shared(report, question.case.name)
        self._authored(report, question.case.name)
        self.answers += 1
        if report.kept:
            self.kept.append(question.case.name)
        check_report(report, question, exact_strides=self.problem.exact_strides)
        return tuple(self.arena.tensor(slot) for slot in slots)

    def _untouched(self, question: Question, placed: Sequence[Slot], before: Sequence[object], margins: object) -> None:
        """Nothing but the outputs may have been written."""
        if [self.arena.digest(slot) for slot in placed] != before:
            raise Refusal(Status.CHEAT, f"changed its inputs on {question.case.name}", "input_mutated")
        if self.arena.margins_digest() != margins:
            raise Refusal(Status.CHEAT, f"wrote beside its tensors on {question.case.name}", "out_of_bounds")

    def place(self, question: Question) -> list[Slot]:
        """The inputs in the arena, weights first: whoever packs them has not seen the activations yet."""
        roles = [draw.role for draw in question.case.inputs]
        with self.gate:
            weights = {i: self.arena.place(v) for i, v in enumerate(question.inputs) if roles[i] is Role.WEIGHT}
        self.pack(list(weights.values()), forget=True)
        with self.gate:
            rest = {i: self.arena.place(v) for i, v in enumerate(question.inputs) if i not in weights}
        return [slot for _, slot in sorted((weights | rest).items())]

    def pack(self, weights: Sequence[Slot], *, forget: bool = False) -> None:
        """Let a file that declares `prepack` rearrange its weights."""
        if weights and self.packs:
            with candidate_failures("in prepack"):
                seconds = self.worker.prepack(weights, PREPARE_TIMEOUT_S[self._device], forget=forget)
            self.packs = seconds is not None

    def _authored(self, report: CallReport, where: str) -> None:
        """Where library calls are forbidden: the file's own code did the work."""
        if not self.worker.audited:
            return
        foreign = [*report.library, *(() if self.answers else self.worker.foreign_calls())]
        if foreign:
            said = f"library calls are forbidden here, and on {where} ran {', '.join(foreign[:4])}"
            raise Refusal(Status.CHEAT, said, "library_call")

    def reserve(self, expected: Sequence[Expected]) -> list[Slot]:
        """Poisoned room for every output."""
        return [self.arena.reserve(leaf.original.shape, leaf.original.dtype) for leaf in expected]

    def check(self, question: Question) -> Leaves:
        """Answer and compare; raises Refusal when any leaf is wrong."""
        outputs = self.answer(question)
        with self.gate:
            verify(outputs, question)
        return outputs

    def rest(self) -> None:
        """Between calls a kernel does nothing: no process of its own goes on, no thread is busy."""
        deadline = time.monotonic() + REST_S
        while len(running := self.worker.processes()) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        if len(running) > 1:
            said = f"left {len(running) - 1} processes of its own running after its calls"
            raise Refusal(Status.CHEAT, said, "left_running")
        if os.environ.get("OMP_WAIT_POLICY", "").lower() != "active" and all(map(self._busy, IDLE_WINDOWS_S)):
            raise Refusal(Status.CHEAT, "goes on working between its calls", "left_running")

    def _busy(self, window_s: float) -> bool:
        time.sleep(SPIN_S)  # threads of OpenMP spin for a moment after a call
        before = busy_seconds(self.worker.processes())
        time.sleep(window_s)
        return busy_seconds(self.worker.processes()) - before > BUSY_SHARE * window_s

    def close(self) -> None:
        """Kill the worker, give the memory back."""
        self.worker.close()
        self.arena.close()


def settle(device: str) -> None:
    """Let what the judge wrote into an arena arrive before a worker, another process, looks at it."""
    if device == "cuda":
        torch.cuda.synchronize()


def constants_of(problem: Problem, case: Case) -> tuple[dict[str, Scalar], tuple[Scalar, ...]]:
    """Keyword and positional constants of a call: named ops take theirs positionally (contracts: Named ops)."""
    if problem.keywords:
        return dict(case.constants), ()
    return {}, tuple(case.constants.values())


def verify(outputs: Leaves, question: Question, guard: str | None = None, status: Status = Status.INCORRECT) -> None:
    """Raise Refusal when the outputs are not what the question demands."""
    mismatch = compare_all(outputs, question.expected, exact=question.case.exact)
    if mismatch is not None:
        raise Refusal(status, f"wrong on {question.case.name}: {mismatch.reason}", guard)


def check_shared(report: CallReport, where: str) -> None:
    """What a kernel did to the process it shares with others, as the worker saw it."""
    if report.hooked:
        said = f"left a trace, a profile hook or a torch mode switched on after {where}"
        raise Refusal(Status.CHEAT, said, "hook_left_on")
    if report.switched:
        raise Refusal(Status.CHEAT, f"changed {report.switched} for the whole process", "global_state")
    if report.patched:
        raise Refusal(Status.CHEAT, f"replaced {report.patched}, which the whole process shares", "patched_library")


def check_report(report: CallReport, question: Question, *, exact_strides: bool) -> None:
    """Number, type, dtype, shape, stride, storage and aliasing of what was returned."""
    name = question.case.name
    count = len(question.expected)
    if report.count != count or len(report.outputs) != count:
        raise Refusal(Status.INCORRECT, f"returned {report.count} outputs on {name}, expected {count}", "output_count")
    wanted = {"tuple", "list"} if count > 1 else {"Tensor"}
    if report.structure not in wanted and report.outputs[0].type_name == "torch.Tensor":
        raise Refusal(Status.INCORRECT, f"returned a {report.structure} on {name}", "output_type")
    # empty_like keeps the order of dims of a transposed input: fair for a named op, whose caller asks for no order
    free_order = not exact_strides and any(not value.is_contiguous() for value in question.inputs)
    for index, (output, leaf) in enumerate(zip(report.outputs, question.expected, strict=True)):
        where = f"output {index} on {name}"
        _check_output(output, leaf.original, where, exact_strides=exact_strides, free_order=free_order)


def _check_output(
    output: OutputReport, own: torch.Tensor, where: str, *, exact_strides: bool, free_order: bool
) -> None:
    if output.type_name != "torch.Tensor":
        raise Refusal(Status.INCORRECT, f"{where} is a {output.type_name}, not a torch.Tensor", "output_type")
    dtype = str(own.dtype).removeprefix("torch.")
    if output.dtype != dtype:
        raise Refusal(Status.INCORRECT, f"{where} is {output.dtype}, expected {dtype}", "output_dtype")
    if output.shape != tuple(own.shape):
        raise Refusal(
            Status.INCORRECT, f"{where} has shape {output.shape}, expected {tuple(own.shape)}", "output_shape"
        )
    if output.device != own.device.type:
        raise Refusal(Status.INCORRECT, f"{where} is on {output.device}, expected {own.device.type}", "output_device")
    if output.aliases_input:
        raise Refusal(Status.CHEAT, f"{where} shares memory with an input", "alias")
    if not (_same_stride(output.stride, own, exact_strides=exact_strides) or (free_order and _is_dense(output))):
        raise Refusal(
            Status.INCORRECT, f"{where} has strides {output.stride}, expected {own.stride()}", "output_stride"
        )
    reach = (output.storage_offset + extent(output.shape, output.stride)) * own.element_size()
    if output.shape and 0 not in output.shape and reach > output.storage_nbytes:
        raise Refusal(Status.INCORRECT, f"{where} reaches beyond its storage", "output_storage")
    if not output.copied:
        raise Refusal(Status.INCORRECT, f"{where} could not be read", "output_storage")


def _same_stride(stride: tuple[int, ...], own: torch.Tensor, *, exact_strides: bool) -> bool:
    """Strides of dims with one element mean nothing; a named op may always return a contiguous tensor."""
    shape = tuple(own.shape)
    if 0 in shape:
        return True

    def significant(steps: Sequence[int]) -> list[int]:
        return [step for size, step in zip(shape, steps, strict=True) if size > 1]

    if significant(stride) == significant(own.stride()):
        return True
    return not exact_strides and significant(stride) == significant(torch.empty(shape, device="meta").stride())


def _is_dense(output: OutputReport) -> bool:
    """Whether each element has a place of its own and none is left over, in any order of dims."""
    step = 1
    for stride, size in sorted((st, si) for st, si in zip(output.stride, output.shape, strict=True) if si > 1):
        if stride != step:
            return False
        step *= size
    return True


# ---------------------------------------------------------------------------------------------- the stages


@dataclass(frozen=True)
class Exam:
    """What the five stages need."""

    workshop: Workshop
    oracle: Oracle
    source: str
    kernel: KernelFile
    nbytes: int
    seed: Path | None = None  # where what the candidate compiles is kept for its later processes

    def cases(self, stage: StageName) -> tuple[Case, ...]:
        """The cases of a stage in the dtypes that the file declares."""
        declared = self.kernel.dtypes
        cases = self.oracle.problem.cases[stage]
        return cases if declared is None else tuple(case for case in cases if case.dtype in declared)

    def secret_cases(self, stage: StageName) -> tuple[Case, ...]:
        """Cases drawn for this candidate alone, in the dtypes that the file declares."""
        draw, declared = self.oracle.problem.secret_cases, self.kernel.dtypes
        cases = draw(stage) if draw is not None else ()
        return cases if declared is None else tuple(case for case in cases if case.dtype in declared)


@dataclass(frozen=True)
class Answered:
    """How many cases of a stage were right, and why others fell away."""

    count: int
    fallen: tuple[str, ...] = ()

    def __add__(self, other: "Answered") -> "Answered":
        return Answered(self.count + other.count, self.fallen + other.fallen)


def note_of(stage: StageName, answered: Answered) -> str:
    """The stage's note. Raises OursError when no case is left: an empty stage proves nothing."""
    if answered.fallen and not answered.count:
        raise OursError(f"the original refuses every case of the {stage} stage: {answered.fallen[0]}")
    return "; ".join((f"{answered.count} cases", *answered.fallen))


def check_cases(
    exam: Exam, examinee: Examinee, stage: StageName, cases: Sequence[Case], secret: Sequence[Case]
) -> Answered:
    """Every case in turn; a secret or edge case on which the original raises falls away."""
    fallen: list[str] = []
    for case in (*cases, *secret):
        try:
            with examinee.gate:
                question = exam.oracle.ask(case)
        except ReferenceRefusal as refusal:
            if stage is not StageName.EDGE and case not in secret:
                raise
            fallen.append(f"not applicable, {_first_line(str(refusal))}")
            continue
        examinee.check(question)
    return Answered(len(cases) + len(secret) - len(fallen), tuple(fallen))


def check_determinism(exam: Exam, examinee: Examinee) -> str:
    """Bitwise the same over runs, addresses and processes; with ERROR_BOUND only where integers make sums exact."""
    cases = exam.cases(StageName.DETERMINISM) or exam.cases(StageName.SHAPES)[:1]
    with examinee.gate:
        other_state = exam.oracle.ask((exam.cases(StageName.SMOKE) or cases)[0])
    kept: list[tuple[Question, Leaves]] = []
    for case in cases:
        with examinee.gate:
            question = exam.oracle.ask(case)
        first = tuple(leaf.clone() for leaf in examinee.check(question))
        for _ in range(DETERMINISM_CALLS - 1):
            _repeat(exam, examinee, question, first, "in the same process")
            examinee.check(other_state)
        with examinee.gate:
            twins = list(_twins(exam.oracle, question))
        for twin in twins:
            outputs = examinee.answer(twin)
            with examinee.gate:
                verify(outputs, twin, "stale_output", Status.CHEAT)
        kept.append((question, first))
    _outputs_stay_valid(exam, examinee, cases[-1])
    examinee.rest()
    if 2 * len(examinee.kept) > examinee.answers:  # once in a while a thread of the kernel's is slow to let go
        said = (
            f"holds on to the memory of its output after the call on {examinee.kept[0]}: it may change or be used again"
        )
        raise Refusal(Status.CHEAT, said, "kept_output")
    if exam.seed is not None:
        with candidate_failures("between its calls"):
            examinee.worker.harvest(exam.seed)
    second = Examinee(exam.workshop, exam.oracle, exam.source, exam.nbytes, seed=exam.seed, gate=examinee.gate)
    try:
        second.load()
        for question, first in kept:
            _repeat(exam, second, question, first, "in a second process")
    finally:
        second.close()
    bound = "" if exam.kernel.error_bound is None else ", ERROR_BOUND declared: bitwise on integers alone"
    return f"{len(cases)} cases × {DETERMINISM_CALLS} runs and a second process{bound}"  # noqa: RUF001


def _twins(oracle: Oracle, question: Question) -> Iterator[Question]:
    """Inputs that almost equal those just seen: the same rows in reverse, and one element changed.

    A kernel that remembers answers by a corner, a sample or a sum of its inputs gives the old one.
    """
    small = max(value.numel() for value in question.inputs) <= FEW_ELEMENTS
    for change in (_reversed_rows, *[_one_element] * (TWINS[oracle.problem.device] if small else 1)):
        inputs = tuple(
            change(value) if value.is_floating_point() and value.numel() > 1 and not draw.fixed else value
            for draw, value in zip(question.case.inputs, question.inputs, strict=True)
        )
        yield Question(question.case, inputs, oracle.expect(question.case, inputs))


def _reversed_rows(value: torch.Tensor) -> torch.Tensor:
    return value.flip(0)


def _one_element(value: torch.Tensor) -> torch.Tensor:
    changed = value.clone()
    place = tuple(secrets.randbelow(size) for size in value.shape)
    changed[place] = changed[place] + 2
    return changed


def _repeat(exam: Exam, examinee: Examinee, question: Question, first: Leaves, where: str) -> None:
    again = examinee.check(question)
    if exam.kernel.error_bound is not None and not question.case.exact:
        return
    if any(not same_bits(a, b) for a, b in zip(again, first, strict=True)):
        raise Refusal(
            Status.INCORRECT, f"other bits for the same inputs {where} on {question.case.name}", "determinism"
        )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality of two contiguous tensors, NaN payloads included."""
    if left.numel() == 0:
        return left.shape == right.shape
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _outputs_stay_valid(exam: Exam, examinee: Examinee, case: Case) -> None:
    """Prepared calls whose contents are exchanged before they run: no call may answer from memory.

    Each output must also survive the calls after it (a few static buffers for all calls do not).
    """
    with examinee.gate:
        few = input_bytes(case) * MANY_CALLS[exam.workshop.device] > FEW_BYTES
        more = 0 if few else secrets.randbelow(MANY_CALLS[exam.workshop.device])
        questions = [exam.oracle.ask(case) for _ in range(CALLS_IN_A_ROW + more)]
    arena, device = examinee.arena, exam.workshop.device
    arena.reset()
    keywords, positional = constants_of(exam.oracle.problem, case)
    placed = [tuple(arena.place(value) for value in question.inputs) for question in reversed(questions)]
    weights = [[s for s, draw in zip(slots, case.inputs, strict=True) if draw.role is Role.WEIGHT] for slots in placed]
    for packed in weights:
        examinee.pack(packed)
    results = len(questions[0].expected)
    calls = [PreparedCall(slots, keywords, positional, results) for slots in placed]
    settle(device)
    with candidate_failures("when called several times in a row"):
        ready = examinee.worker.prepare(calls, PREPARE_TIMEOUT_S[device])
        if "unjoined" in ready.reason:
            said = "leaves work on a stream that the caller's own stream does not wait for"
            raise Refusal(Status.CHEAT, said, "unjoined_stream")
        _exchange(arena, placed, questions, weights=True)
        for packed in weights:
            examinee.pack(packed)
        _exchange(arena, placed, questions, weights=False)
        settle(device)
        examinee.worker.time(1, PREPARE_TIMEOUT_S[device])
    for slot in (slot for slots in placed for slot in slots):
        arena.poison(slot)  # an output that lives in an input, whatever the worker says, is gone now
    outputs = examinee.reserve(questions[0].expected)
    for index, question in enumerate(questions):
        for slot in outputs:
            arena.poison(slot)
        settle(device)
        with candidate_failures("when its output was read later"):
            report = examinee.worker.collect(index, outputs)
        check_report(report, question, exact_strides=exam.oracle.problem.exact_strides)
        with examinee.gate:
            verify(tuple(arena.tensor(slot) for slot in outputs), question, "static_output", Status.CHEAT)


def _exchange(
    arena: Arena, placed: Sequence[tuple[Slot, ...]], questions: Sequence[Question], *, weights: bool
) -> None:
    """New contents for the weights, or for everything else."""
    for slots, question in zip(placed, questions, strict=True):
        for slot, value, draw in zip(slots, question.inputs, question.case.inputs, strict=True):
            if (draw.role is Role.WEIGHT) is weights:
                copy_into(arena.tensor(slot), value)


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values, also where `target` repeats rows by strides of 0."""
    for axis in range(target.dim()):
        if target.stride(axis) == 0 and target.shape[axis] > 1:
            target, value = target.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    target.copy_(value)


def arena_bytes(oracle: Oracle) -> int:
    """Room for the calls in a row of the largest case, inputs and outputs."""
    problem = oracle.problem
    cases = [case for stage in problem.cases.values() for case in stage] + list(problem.bench)
    largest = max(cases, key=input_bytes)
    return (CALLS_IN_A_ROW + 1) * (input_bytes(largest) + output_bytes(oracle, largest)) + ARENA_SLACK


def input_bytes(case: Case) -> int:
    """Storage of all inputs of a case."""
    return sum(draw.extent * itemsize(draw.dtype) for draw in case.inputs)


def output_bytes(oracle: Oracle, case: Case) -> int:
    """Bytes of all outputs of a case, by asking the original once."""
    outputs = oracle.original(oracle.draw(case), case.constants)
    return sum(prod(leaf.shape) * leaf.element_size() for leaf in outputs)

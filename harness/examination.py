"""The five stages of one candidate in order; on a GPU several processes of it answer side by side.

Most of a GPU verdict is compilation, once for each dtype and kind of shape, so each dtype gets a process of its own
with its cases of every stage, and the layouts of the first dtype one more. The judge itself computes for one of them at
a time. What is found is told in the order of the stages, whichever process found it first.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch

from harness.problem import Case
from harness.records import StageName
from harness.stages import Answered, Exam, Examinee, Progress, check_cases, check_determinism, note_of

CASE_STAGES = (StageName.SHAPES, StageName.STABILITY, StageName.EDGE)
BESIDE_SHARE = 0.3
"""Arenas of all processes together may take this much of the device's free memory."""


@dataclass(frozen=True)
class Share:
    """The cases of one process: known and secret ones by stage."""

    known: dict[StageName, tuple[Case, ...]]
    secret: dict[StageName, tuple[Case, ...]]

    def part(self, keep: "Keep") -> "Share":
        """The cases that `keep` says yes to."""
        return Share(keep.of(self.known), keep.of(self.secret))

    def stages(self) -> list[StageName]:
        """Where it has cases at all."""
        return [stage for stage in CASE_STAGES if self.known[stage] or self.secret[stage]]


@dataclass(frozen=True)
class Keep:
    """Cases of one dtype in some stages."""

    dtype: str
    stages: Sequence[StageName]

    def of(self, cases: dict[StageName, tuple[Case, ...]]) -> dict[StageName, tuple[Case, ...]]:
        """What of `cases` is kept."""
        return {
            stage: tuple(case for case in found if case.dtype == self.dtype) if stage in self.stages else ()
            for stage, found in cases.items()
        }


def run_stages(exam: Exam, examinee: Examinee, progress: Progress) -> None:
    """All five stages in order; raises Refusal at the first failure."""
    with progress.stage(StageName.SMOKE):
        examinee.load()
        for case in exam.cases(StageName.SMOKE) or exam.cases(StageName.SHAPES)[:1]:
            examinee.check(exam.oracle.ask(case))
    mine, *theirs = shares(exam)
    with _beside(exam, examinee, theirs) as others:
        for stage in (StageName.SHAPES, StageName.STABILITY):
            with progress.stage(stage) as notes:
                notes.append(_stage(exam, examinee, stage, mine, others))
        with progress.stage(StageName.DETERMINISM) as notes:
            notes.append(check_determinism(exam, examinee))
        with progress.stage(StageName.EDGE) as notes:
            notes.append(_stage(exam, examinee, StageName.EDGE, mine, others))


def _stage(exam: Exam, examinee: Examinee, stage: StageName, mine: Share, others: "Sequence[Running]") -> str:
    answered = check_cases(exam, examinee, stage, mine.known[stage], mine.secret[stage])
    for running in others:
        if stage in running:
            answered += running[stage].result()
    return note_of(stage, answered)


def shares(exam: Exam) -> list[Share]:
    """The cases of each process; all in one on a CPU, whose cores the judge needs itself, and for very large cases."""
    whole = Share(
        {stage: exam.cases(stage) for stage in CASE_STAGES}, {stage: exam.secret_cases(stage) for stage in CASE_STAGES}
    )
    found = [case.dtype for cases in whole.known.values() for case in cases]
    dtypes = [dtype for dtype in exam.oracle.problem.dtypes if dtype in found]
    extra = set(found) - set(dtypes)
    if exam.workshop.device != "cuda" or extra or (len(dtypes) + 1) * exam.nbytes > BESIDE_SHARE * _free_bytes():
        return [whole]
    first, *rest = dtypes
    early = (StageName.SHAPES, StageName.STABILITY)
    parts = [Keep(first, early), Keep(first, (StageName.EDGE,)), *(Keep(dtype, CASE_STAGES) for dtype in rest)]
    return [whole.part(keep) for keep in parts]


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


Running = dict[StageName, "Future[Answered]"]


@contextmanager
def _beside(exam: Exam, examinee: Examinee, others: Sequence[Share]) -> Iterator[list[Running]]:
    """The other processes at work; when the context ends early they are killed, whatever they would have said."""
    busy = [share for share in others if share.stages()]
    if not busy:
        yield []
        return
    gate, before = Lock(), examinee.gate
    opened: list[Examinee] = []
    with ThreadPoolExecutor(len(busy), "examinee") as threads:
        try:
            examinee.gate = gate
            # one by one, so that those opened before a failure are closed
            opened.extend(Examinee(exam.workshop, exam.oracle, exam.source, exam.nbytes, gate=gate) for _ in busy)
            yield [_start(threads, exam, each, share) for each, share in zip(opened, busy, strict=True)]
        finally:
            for each in opened:
                each.close()
            examinee.gate = before


def _start(threads: ThreadPoolExecutor, exam: Exam, examinee: Examinee, share: Share) -> Running:
    futures: Running = {stage: Future() for stage in share.stages()}
    threads.submit(_answer, exam, examinee, share, futures)
    return futures


def _answer(exam: Exam, examinee: Examinee, share: Share, futures: Running) -> None:
    """In a thread: one stage after another; after a failure the later ones fail alike."""
    failure: BaseException | None = None
    for number, (stage, future) in enumerate(futures.items()):
        try:
            if failure is not None:
                raise failure
            if number == 0:
                examinee.load()
            future.set_result(check_cases(exam, examinee, stage, share.known[stage], share.secret[stage]))
        except BaseException as error:  # noqa: BLE001 - raised again in the judge's own thread, where it is waited for
            failure = error
            future.set_exception(error)

"""Runs sessions over a folder of KernelBench problems: one problem after the other, each row written when it is known.

A second run of the same folder takes up where the first one stopped: finished problems keep their rows, a session
that was cut off is resumed.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from agent import measuring, runner
from agent.budget import Budget
from agent.errors import InputError, OvernightError, StopRequestedError
from agent.journal import Journal
from agent.kernelbench import Fate, Result, resized, session_name
from agent.opening import create
from agent.places import STATE_FOLDER, SessionPlaces, write_whole
from agent.records import RowStatus
from agent.session import Options, Show, still_valid
from agent.verbs import Harness
from harness import wire
from harness.records import JudgeRequest, LibraryPolicy, ModelSpec, Verdict

UNJUDGEABLE = "unjudgeable"
TOO_LARGE = "too large"


@dataclass(frozen=True)
class Course:
    """What is the same for every problem of a folder."""

    root: Path  # the workspace
    folder: Path
    device: str
    budget: Budget
    proposer: str
    sizes: dict[str, int]
    out: Path | None = None

    @property
    def state(self) -> Path:
        """Where rows and ModelNew files are kept, by folder and by what was asked for."""
        asked = repr((str(self.folder.resolve()), self.device, sorted(self.sizes.items())))
        return self.root / STATE_FOLDER / f"kernelbench-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"

    @property
    def answers(self) -> Path:
        """Where ModelNew files go."""
        return self.out or self.state / "model_new"


@dataclass(frozen=True)
class Doer:
    """What does the work: harness processes for one problem, and how a session is run."""

    harness: Callable[[Path], Harness]  # logging into a folder
    show: Show


def run_all(course: Course, files: Sequence[Path], doer: Doer) -> Iterator[Result]:
    """The row of each problem, old ones first read and never made again. Raises MachineError (run again to go on)."""
    course.state.mkdir(parents=True, exist_ok=True)
    for path in files:
        one = _Problem(course, path, doer)
        yield one.stored() or one.settle()


@dataclass(frozen=True)
class _Problem:
    """One problem on its way to its row."""

    course: Course
    path: Path
    doer: Doer

    @property
    def name(self) -> str:
        return session_name(self.course.folder, self.path)

    @property
    def folder(self) -> Path:
        return self.course.state / self.name

    def stored(self) -> Result | None:
        """The row of an earlier run."""
        try:
            return wire.from_json(Result, (self.folder / "result.json").read_bytes())
        except FileNotFoundError:
            return None

    def settle(self) -> Result:
        """Judge the problem by itself, run its session, write and judge its ModelNew."""
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            result = self.attempt()
        except StopRequestedError:
            raise
        except OvernightError as error:
            said = " ".join(str(error).split())
            if not isinstance(error, InputError) and TOO_LARGE not in said:
                raise
            result = self.row(Fate.TOO_LARGE if TOO_LARGE in said else Fate.UNUSABLE, said)
        result = replace(result, seconds=round(time.monotonic() - started, 1))
        write_whole(self.folder / "result.json", wire.to_json(result))
        return result

    def row(self, fate: Fate, detail: str) -> Result:
        return Result(str(self.path.relative_to(self.course.folder)), fate, detail)

    def attempt(self) -> Result:
        problem = self.problem()
        text = problem.read_text(encoding="utf-8")
        own = self.judged(problem, text, bench=False)
        if not own.accepted:
            fate = Fate.DEGENERATE if own.guard == UNJUDGEABLE else Fate.UNUSABLE
            return self.row(Fate.TOO_LARGE if TOO_LARGE in own.detail else fate, own.detail)
        places = self.night(problem)
        return self.answered(problem, places)

    def problem(self) -> Path:
        """The problem's file, or a copy of it with other sizes."""
        if not self.course.sizes:
            return self.path.resolve()
        copy = self.folder / self.path.name
        write_whole(copy, resized(self.path.read_text(encoding="utf-8"), self.course.sizes))
        return copy.resolve()

    def judged(self, problem: Path, source: str, *, bench: bool) -> Verdict:
        request = JudgeRequest(str(problem), source, device=self.course.device, bench=bench)
        return self.doer.harness(self.folder).judge_once(request)

    def night(self, problem: Path) -> SessionPlaces:
        """The problem's session, new or taken up again."""
        places = SessionPlaces(self.course.root, self.name)
        if not places.journal.exists():
            spec = ModelSpec(str(problem), device=self.course.device)
            options = Options(
                spec, self.course.device, self.course.proposer, LibraryPolicy.FORBID, budget=self.course.budget
            )
            create(self.course.root, self.name, options)
        runner.run_session(places, show=self.doer.show, detached=False)
        return places

    def answered(self, problem: Path, places: SessionPlaces) -> Result:
        """Write what the session keeps as a ModelNew, and judge that file as anybody's."""
        with closing(Journal(places.journal)) as journal:
            experiments = still_valid(journal)
        profile = places.read_profile()
        kernels = measuring.kept_kernels(profile.targets if profile else (), experiments)
        kept = sum(one.status is RowStatus.KEEP for one in experiments)
        base = replace(self.row(Fate.NO_KERNEL, "nothing that was tried makes it faster"), experiments=len(experiments))
        if not kernels:
            return base
        request = measuring.verify_request(ModelSpec(str(problem), device=self.course.device), places, kernels, ())
        written = self.doer.harness(self.folder).model_new(request)
        if not written.source:
            return replace(base, fate=Fate.REFUSED, kept=kept, detail=f"no ModelNew was written: {written.reason}")
        answer = self.course.answers / self.path.relative_to(self.course.folder)
        answer.parent.mkdir(parents=True, exist_ok=True)
        write_whole(answer, written.source)
        verdict = self.judged(problem, written.source, bench=True)
        timing = verdict.timing
        return replace(
            base,
            fate=Fate.SOLVED if verdict.accepted and timing else Fate.REFUSED,
            detail=verdict.detail,
            speedup_vs_pytorch=timing.speedup_vs_pytorch if timing else None,
            speedup_vs_best=timing.speedup_vs_best if timing else None,
            ci_low=timing.ci_low if timing else None,
            ci_high=timing.ci_high if timing else None,
            kept=kept,
            model_new=str(answer),
        )

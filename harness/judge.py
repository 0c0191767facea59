"""The judge: one kernel file in, one verdict out. Everything trusted about a verdict is computed in this process.

Each target gets a courtroom that lasts as long as the judge: its oracle, its calibration and its baselines. Each
candidate gets fresh workers, arenas and values. What happens to a candidate is a verdict; what happens to us is an
exception or a verdict that blames the environment.
"""

import hashlib
import importlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from harness import wire
from harness.benchmark import Baselines, Outcome, run_benchmark
from harness.calibration import Calibration, calibrate
from harness.compiled import compiled_kernels
from harness.errors import InputError, MachineError, NoDeviceError, OursError
from harness.examination import run_stages
from harness.kernelbench import read_problem
from harness.kernelbench_text import ProblemText, module_class
from harness.oracle import Oracle
from harness.problem import NamedOp, Problem, named_problem, target_problem
from harness.records import (
    NAMED_OPS,
    Blame,
    JudgeRequest,
    LibraryPolicy,
    StageName,
    StageResult,
    StageStatus,
    Status,
    Target,
    Timing,
    Verdict,
)
from harness.room import must_fit
from harness.rpc import EventSink
from harness.stages import Exam, Examinee, Progress, Refusal, arena_bytes
from harness.statics import KernelFile, StaticRefusal, read_kernel, read_module
from harness.workshop import Workshop

MAX_COURTROOMS = 64


@dataclass
class Courtroom:
    """What lasts of one target between its candidates."""

    problem: Problem
    oracle: Oracle
    calibration: Calibration
    nbytes: int
    baselines: dict[str, Baselines] = field(default_factory=dict)

    def close(self) -> None:
        """End all baseline processes."""
        for baselines in self.baselines.values():
            baselines.close()
        self.baselines.clear()


class Judge:
    """Owns the workshops and courtrooms of one judge process; `close` ends every process it started."""

    def __init__(self) -> None:
        self._workshops: dict[str, Workshop] = {}
        self._courtrooms: dict[str, Courtroom] = {}

    def judge(self, request: JudgeRequest, emit: EventSink) -> Verdict:
        """Judge one file. Raises InputError for what the user gave, MachineError where no worker can run at all."""
        target = resolve(request)
        verdict = _Trial(self, request, target, emit).verdict()
        self._make_ready(request.device)
        return verdict

    def _make_ready(self, device: str) -> None:
        """Between verdicts: the next worker warmed, the judge's own device memory given back."""
        if device in self._workshops:
            self._workshops[device].prepare_next()
        if device == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def sandbox_layers(self) -> list[str]:
        """The layers that workers really run under, missing ones named with the reason."""
        device = next(iter(self._workshops), "cuda" if torch.cuda.is_available() else "cpu")
        return list(self.workshop(device).layers)

    def workshop(self, device: str) -> Workshop:
        """The warm parent of a device, started once."""
        if device == "cuda" and not torch.cuda.is_available():
            raise NoDeviceError("device cuda was asked for, but torch sees no CUDA device here; use --device cpu")
        if device not in self._workshops:
            # Idle OpenMP threads spin: a judge that uses every core would slow the workers whom it times.
            torch.set_num_threads(min(8, max(1, (os.cpu_count() or 2) // 2)))
            self._workshops[device] = Workshop(device)
        return self._workshops[device]

    def courtroom(self, key: str, problem: Problem) -> Courtroom:
        """The courtroom of a target, opened and calibrated once; baseline processes of others are ended."""
        for other, room in self._courtrooms.items():
            if other != key:
                room.close()
        if key not in self._courtrooms:
            if len(self._courtrooms) >= MAX_COURTROOMS:
                self._courtrooms.pop(next(iter(self._courtrooms))).close()
            oracle = Oracle(problem)
            self._courtrooms[key] = Courtroom(problem, oracle, calibrate(oracle), arena_bytes(oracle))
        return self._courtrooms[key]

    def close(self) -> None:
        """End baselines, workers and warm parents."""
        for room in self._courtrooms.values():
            room.close()
        self._courtrooms.clear()
        for workshop in self._workshops.values():
            workshop.close()
        self._workshops.clear()


@dataclass(frozen=True)
class Resolved:
    """A target found: its problem and the key of its courtroom; `module` is set where a candidate may be a module."""

    name: str
    key: str
    problem: Problem
    module: ProblemText | None = None


def resolve(request: JudgeRequest) -> Resolved:
    """The problem that a request names; raises InputError when there is none."""
    if request.device not in {"cpu", "cuda"}:
        raise InputError(f"device {request.device!r} is neither cpu nor cuda")
    scope = f"{request.device}:{request.dtype}:{sorted(request.shape.items())}"
    if request.target in NAMED_OPS:
        op: NamedOp = importlib.import_module(f"harness.specs.{request.target}").SPEC
        problem = named_problem(op, request.device, dtype=request.dtype, shape=request.shape)
        return Resolved(request.target, f"{request.target}:{scope}", problem)
    path = Path(request.target)
    if path.suffix == ".py" and path.is_file():
        return _resolve_kernelbench(path, request, scope)
    if not path.is_file():
        raise InputError(f"target {request.target!r} is neither one of {', '.join(NAMED_OPS)} nor a target's file")
    if request.shape:
        raise InputError("--shape narrows named ops and KernelBench files; a session's target keeps its own sizes")
    text = path.read_bytes()
    try:
        target = wire.from_json(Target, text)
    except (ValidationError, ValueError) as error:
        raise InputError(f"{path} is no target file: {error}") from error
    samples = path.with_name(f"{path.stem}.samples.pt")
    found = str(samples) if samples.is_file() else None
    count = len(torch.load(samples, map_location="cpu", weights_only=True)) if found else 0
    digest = hashlib.sha256(text).hexdigest()
    return Resolved(target.id, f"{digest}:{scope}", target_problem(target, request.device, found, count))


def _resolve_kernelbench(path: Path, request: JudgeRequest, scope: str) -> Resolved:
    found = read_problem(path, request.device, dtype=request.dtype, sizes=request.shape)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Resolved(found.problem.target, f"{digest}:{scope}", found.problem, found.text)


@dataclass
class _Trial:
    """One candidate's way through the judge; every end of it is a verdict."""

    judge: Judge
    request: JudgeRequest
    target: Resolved
    emit: EventSink
    timing: Timing | None = None
    layers: tuple[str, ...] = ()
    untimed: str = ""

    def verdict(self) -> Verdict:
        progress = Progress(self.emit)
        try:
            outcome = self.run(progress)
        except Refusal as refusal:
            stage = refusal.stage or progress.current
            return self.refused(progress, refusal, stage)
        except torch.OutOfMemoryError as error:
            said = f"too large to verify on this device: {str(error).splitlines()[0]}"
            return self.blamed(progress, said, Blame.ENVIRONMENT)
        except NoDeviceError as error:
            return self.refused(
                progress, Refusal(Status.ENVIRONMENT, str(error), "no_device", Blame.ENVIRONMENT), progress.current
            )
        except MachineError as error:
            return self.blamed(progress, str(error), Blame.ENVIRONMENT)
        except OursError as error:
            return self.blamed(progress, str(error), Blame.OURS)
        if outcome is None:
            said = f"all five stages passed; not benchmarked{self.untimed}"
            return self.build(progress, Status.DISCARD, said, None, None, None)
        return self.build(progress, outcome.status, outcome.detail, None, None, None)

    def run(self, progress: Progress) -> Outcome | None:
        with progress.stage(StageName.SMOKE):
            kernel = self.read()
            workshop = self.judge.workshop(self.request.device)
            if self.request.shape:
                must_fit(self.target.problem)
            room = self.judge.courtroom(self.target.key, self.target.problem)
            if room.calibration.unjudgeable is not None:
                if self.request.shape:
                    sizes = ",".join(f"{name}={size}" for name, size in self.request.shape.items())
                    raise InputError(
                        f"--shape {sizes}: {self.target.name} cannot be judged at these sizes, since"
                        f" {room.calibration.unjudgeable}; choose larger ones"
                    )
                said = f"{self.target.name} cannot be judged: {room.calibration.unjudgeable}"
                raise Refusal(Status.ENVIRONMENT, said, "unjudgeable", Blame.OURS)
        request = self.as_kernels()
        seed = workshop.seed_folder()
        try:
            self.examine(Exam(workshop, room.oracle, request.source, kernel, room.nbytes, seed), progress)
            self.emit("compiled", {"kernels": [one.sentence() for one in compiled_kernels(seed)]})
            self.untimed = self.why_untimed(kernel)
            if self.untimed:
                return None
            with progress.stage(StageName.BENCHMARK) as notes:
                baselines = self.baselines(workshop, room, request.incumbent)
                outcome = run_benchmark(workshop, room.oracle, baselines, request, kernel.dtypes, seed)
                self.timing = outcome.timing
                notes.append(outcome.detail)
            return outcome
        finally:
            shutil.rmtree(seed, ignore_errors=True)

    def why_untimed(self, kernel: KernelFile) -> str:
        """What is said of an accepted file that is not timed; empty for one that is."""
        if not self.request.bench:
            return " by request"
        timed = dict.fromkeys(case.dtype for case in self.target.problem.bench)
        if kernel.dtypes is None or set(kernel.dtypes) & set(timed):
            return ""
        return f": it declares {', '.join(kernel.dtypes)}, and timed is {', '.join(timed)} (--dtype times another)"

    def as_kernels(self) -> JudgeRequest:
        """The request with modules, where a target takes them, written as kernel files."""
        request, module = self.request, self.target.module
        if module is None:
            return request
        incumbent = None if request.incumbent is None else module.kernel(request.incumbent)
        return replace(request, source=module.kernel(request.source), incumbent=incumbent)

    def examine(self, exam: Exam, progress: Progress) -> None:
        examinee = Examinee(exam.workshop, exam.oracle, exam.source, exam.nbytes)
        try:
            self.layers = examinee.worker.layers
            examinee.worker.audited = self.request.library_calls is LibraryPolicy.FORBID
            run_stages(exam, examinee, progress)
        finally:
            examinee.close()

    def read(self) -> KernelFile:
        """Static checks; raises Refusal."""
        problem = self.target.problem
        keywords = tuple(problem.required) if problem.keywords else ()
        if self.target.module is not None and module_class(self.request.source) is not None:
            kernel = read_module(self.request.source)
        else:
            kernel = read_kernel(self.request.source, arguments=len(problem.arguments), keywords=keywords)
        if isinstance(kernel, StaticRefusal):
            status = Status.CHEAT if kernel.guard else Status.CRASH
            wanted = (
                f" (a kernel_fn gets {', '.join(problem.arguments)}; or give a ModelNew)" if self.target.module else ""
            )
            raise Refusal(status, kernel.detail + wanted, kernel.guard)
        if kernel.dtypes is not None and not set(kernel.dtypes) & set(problem.dtypes):
            said = f"the file declares {', '.join(kernel.dtypes)}, the target is judged in {', '.join(problem.dtypes)}"
            raise Refusal(Status.INCORRECT, said, "output_dtype")
        if self.request.library_calls is LibraryPolicy.FORBID and kernel.library:
            said = f"library calls are forbidden here, and the file uses {', '.join(kernel.library[:4])}"
            raise Refusal(Status.CHEAT, said, "library_call")
        return kernel

    def baselines(self, workshop: Workshop, room: Courtroom, incumbent: str | None) -> Baselines:
        """What must be beaten, measured once per incumbent; the processes of an older incumbent are ended."""
        key = "pytorch" if incumbent is None else hashlib.sha256(incumbent.encode()).hexdigest()
        if key not in room.baselines:
            room.close()
            self.emit("baseline", {"target": self.target.name})
            room.baselines[key] = Baselines(workshop, room.oracle, incumbent)
        return room.baselines[key]

    def blamed(self, progress: Progress, said: str, blame: Blame) -> Verdict:
        return self.refused(progress, Refusal(Status.ENVIRONMENT, said, None, blame), progress.current)

    def refused(self, progress: Progress, refusal: Refusal, stage: StageName) -> Verdict:
        if stage not in progress.results:
            progress.results[stage] = StageResult(StageStatus.FAIL, 0.0, refusal.detail)
        return self.build(progress, refusal.status, refusal.detail, stage, refusal.guard, refusal.blame)

    def build(
        self,
        progress: Progress,
        status: Status,
        detail: str,
        stage: StageName | None,
        guard: str | None,
        blame: Blame | None,
    ) -> Verdict:
        not_run = StageResult(StageStatus.NOT_RUN, 0.0)
        stages: Mapping[StageName, StageResult] = {name: progress.results.get(name, not_run) for name in StageName}
        return Verdict(
            accepted=status in {Status.KEEP, Status.DISCARD},
            status=status,
            target=self.target.name,
            device=self.request.device,
            stage=stage,
            guard=guard,
            detail=detail,
            blame=blame,
            stages=stages,
            timing=self.timing,
            sandbox=self.layers,
            kernel_sha256=hashlib.sha256(self.request.source.encode()).hexdigest(),
        )


def silent(_name: str, _body: Mapping[str, Any]) -> None:
    """An event sink for callers that do not listen."""

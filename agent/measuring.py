"""What a session measures: a candidate, by its judge process; the model with what is kept, by a process of its own."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import policy
from agent.errors import OursError, OvernightError
from agent.harness_client import HarnessDiedError, HarnessProcess
from agent.journal import Journal, now_iso
from agent.places import SessionPlaces
from agent.policy import best_disjoint
from agent.ranking import gained
from agent.records import (
    Candidate,
    Experiment,
    RowStatus,
)
from agent.session import Session, read_options, still_valid
from agent.verbs import JUDGE_TIMEOUT_S, Harness
from harness.records import (
    JudgeRequest,
    KeptKernel,
    ModelSpec,
    Target,
    Verdict,
    VerifyReport,
    VerifyRequest,
)

QUICK_MODES = {"cpu": ("overnight", "eager", "compile"), "cuda": ("overnight", "eager", "compile", "reduce_overhead")}


class Judge:
    """The session's judge process: started with the first candidate, started once again when it dies."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process: HarnessProcess | None = None

    def __call__(self, number: int, candidate: Candidate) -> Verdict:
        """The verdict; events go to the experiment's log. Raises StopRequestedError, MachineError, OursError."""
        session = self._session
        incumbent = session.incumbent(candidate.target)
        tried = [one for one in session.experiments() if one.target == candidate.target and one.verdict]
        request = JudgeRequest(
            target=str(session.places.target_file(candidate.target)),
            source=candidate.source,
            incumbent=incumbent.source if incumbent else None,
            device=session.options.device,
            library_calls=session.options.library_calls,
            trials=len(tried),
        )
        log = session.places.experiment(number) / "log.txt"
        try:
            return self._call(request, log)
        except HarnessDiedError as error:
            session.say(f"the judge is started again: {str(error).splitlines()[0]}")
            self.close()
            return self._call(request, log)

    def _call(self, request: JudgeRequest, log: Path) -> Verdict:
        self._process = self._process or self._session.harness.start("judge")
        with log.open("a", buffering=1, encoding="utf-8") as file:

            def write(name: str, body: Mapping[str, Any]) -> None:
                file.write(f"{now_iso()} {name} {json.dumps(dict(body), ensure_ascii=False)}\n")
                self._session.harness.on_event(name, body)

            verdict = self._process.call("judge", request, Verdict, timeout_s=JUDGE_TIMEOUT_S, on_event=write)
        if verdict.kernel_sha256 != hashlib.sha256(request.source.encode()).hexdigest():
            raise OursError("The judge answered for another kernel than the one it was given.")
        return verdict

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process:
            self._process.close()
            self._process = None


def measure_model(session: Session, one: Experiment) -> tuple[VerifyReport | None, str | None]:
    """The model with everything kept and this one; and why it must go again, or None."""
    kernels = kept_kernels(session.targets, [*session.experiments(), replace(one, status=RowStatus.KEEP)])
    if one.target not in kernels:
        return None, "another choice of disjoint kernels saves more"
    before = kept_kernels(session.targets, session.experiments())
    session.say(f"measuring the model with {len(kernels)} kept kernel{'s' * (len(kernels) > 1)}")
    try:
        report = verify(session, kernels, QUICK_MODES[session.options.device], before=before)
    except OvernightError as error:
        return None, f"the model could not be measured with it: {' '.join(str(error).split())}"
    return report, policy.isolated_only(one.target, report)


def verify(
    session: Session,
    kernels: dict[str, Candidate],
    modes: tuple[str, ...],
    *,
    before: Mapping[str, Candidate] | None = None,
) -> VerifyReport:
    """Measure the whole model in a process of its own, and with the kernels of `before` where those are given."""
    return session.harness.verify(verify_request(session.options.model, session.places, kernels, modes, before=before))


def kept_kernels(targets: Sequence[Target], experiments: Sequence[Experiment]) -> dict[str, Candidate]:
    """The kernels to splice in, by target: the best disjoint choice of what is kept."""
    latest, saved = {}, {}
    for target in targets:
        mine = [one for one in experiments if one.target == target.id and one.status is RowStatus.KEEP]
        if mine and mine[-1].candidate:
            latest[target.id] = mine[-1].candidate
            saved[target.id] = target.time_us * len(target.call_sites) * max(1.0 - 1.0 / gained(mine), 0.0) + 1e-9
    return {name: latest[name] for name in sorted(best_disjoint(targets, saved))}


def verify_request(
    model: ModelSpec,
    places: SessionPlaces,
    kernels: Mapping[str, Candidate],
    modes: tuple[str, ...],
    *,
    bisect: bool = False,
    before: Mapping[str, Candidate] | None = None,
) -> VerifyRequest:
    """Ask for the model with those kernels in it."""
    return VerifyRequest(
        model, _pairs(places, kernels), modes, bisect, None if before is None else _pairs(places, before)
    )


def _pairs(places: SessionPlaces, kernels: Mapping[str, Candidate]) -> tuple[KeptKernel, ...]:
    return tuple(KeptKernel(str(places.target_file(name)), one.source) for name, one in kernels.items())


def verify_session(harness: Harness, places: SessionPlaces, modes: tuple[str, ...], *, bisect: bool) -> VerifyReport:
    """Measure a session's model with what it keeps; works beside a running session."""
    profile = places.read_profile()
    with closing(Journal(places.journal)) as journal:
        options, experiments = read_options(journal), still_valid(journal)
    kernels = kept_kernels(profile.targets if profile else (), experiments)
    return harness.verify(verify_request(options.model, places, kernels, modes, bisect=bisect))

"""What a session asks to be measured: a candidate against the kernel that stands, the model with what is kept."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from agent.executors.base import Job
from agent.journal import Journal
from agent.places import SessionPlaces
from agent.ranking import gained
from agent.records import Candidate, Experiment, ExperimentState, RowStatus
from agent.selection import best_disjoint
from agent.session import Session, read_options, still_valid
from agent.verbs import Harness
from harness.records import (
    JudgeRequest,
    KeptKernel,
    ModelSpec,
    Target,
    VerifyReport,
    VerifyRequest,
)

QUICK_MODES = {"cpu": ("overnight", "eager", "compile"), "cuda": ("overnight", "eager", "compile", "reduce_overhead")}


def judge_job(session: Session, number: int, candidate: Candidate) -> Job:
    """Ask for a verdict on a candidate against the kernel that stands on the branch now."""
    incumbent = session.incumbent(candidate.target)
    earlier = [one for one in session.experiments() if one.target == candidate.target and one.number != number]
    request = JudgeRequest(
        target=str(session.places.target_file(candidate.target)),
        source=candidate.source,
        incumbent=incumbent.source if incumbent else None,
        device=session.options.device,
        library_calls=session.options.library_calls,
        trials=len([one for one in earlier if one.verdict or one.state is ExperimentState.PROPOSED]),
    )
    return Job(number, request, session.places.experiment(number) / "log.txt")


def original_job(session: Session, one: Experiment) -> Job:
    """Ask for a verdict on the target's original, as if it were a candidate: does the machine still judge rightly?"""
    target = session.target(one.target)
    source = (
        f"{target.reference}\n\n\ndef kernel_fn(*inputs, **constants):\n    return reference(*inputs, **constants)\n"
    )
    request = JudgeRequest(
        str(session.places.target_file(one.target)), source, device=session.options.device, bench=False
    )
    return Job(one.number, request, session.places.experiment(one.number) / "log.txt")


def measure_job(session: Session, one: Experiment) -> Job | None:
    """Ask for the model with everything kept and this one; None when another choice of kernels is the better one."""
    kernels = kept_kernels(session.targets, [*session.experiments(), replace(one, status=RowStatus.KEEP)])
    if one.target not in kernels:
        return None
    before = kept_kernels(session.targets, session.experiments())
    session.say(f"measuring the model with {len(kernels)} kept kernel{'s' * (len(kernels) > 1)}")
    modes = QUICK_MODES[session.options.device]
    request = verify_request(session.options.model, session.places, kernels, modes, before=before)
    return Job(one.number, request, session.places.experiment(one.number) / "log.txt")


def verify(session: Session, kernels: dict[str, Candidate], modes: tuple[str, ...]) -> VerifyReport:
    """Measure the whole model in a process of its own, when nothing else is at work."""
    return session.harness.verify(verify_request(session.options.model, session.places, kernels, modes))


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

"""What the experiments add up to: targets before and after, failures by kind, cost, events, next steps. Pure."""

from collections import Counter
from dataclasses import dataclass

from agent.measuring import kept_kernels
from agent.morning.headline import Belief, headline
from agent.morning.night import Night, Trial
from agent.ranking import DONE_AT_BOUND, gained
from agent.records import RowStatus
from agent.tables import nested_targets
from harness.records import Target

ROUTINE = ("measuring the model with", "profiling ", "final verification of", "experiment ")
NOT_FAILED = {RowStatus.KEEP, RowStatus.DISCARD, None}
OF_THE_MACHINE = {RowStatus.ENVIRONMENT: "the machine failed or was too busy", RowStatus.INTERRUPTED: "cut off"}


@dataclass(frozen=True)
class TargetLine:
    """One target before and after the night; times are µs per call, shares of the model's time then and now."""

    target: Target
    nested: bool  # a fusion, listed below the first target that it covers
    share_before: float
    share_after: float | None  # None: it is inside a fusion that was kept
    time_after_us: float
    gain: float  # how many times faster than the reference's best it runs now
    tried: int
    kept: int | None  # number of the experiment that stands
    state: str


def target_lines(night: Night) -> tuple[TargetLine, ...]:
    """The ranking with what came of it. Shares afterwards are computed from the measured kernels' speedups."""
    applied = set(kept_kernels(night.targets, [one.experiment for one in night.trials if night.counts(one)]))
    covered = {member: one.id for one in night.targets if one.id in applied for member in one.members}
    left = {one.id: one.share / (_gain(night, one.id) if one.id in applied else 1.0) for one in night.targets}
    saved = sum(one.share - left[one.id] for one in night.targets if one.id in applied)
    return tuple(
        _target_line(night, one, covered, left[one.id] / max(1.0 - saved, 1e-9), nested=nested)
        for one, nested in nested_targets(night.targets)
    )


def _target_line(night: Night, target: Target, covered: dict[str, str], after: float, *, nested: bool) -> TargetLine:
    mine = night.of_target(target.id)
    kept = [one for one in mine if one.kept]
    gain = _gain(night, target.id)
    return TargetLine(
        target=target,
        nested=nested,
        share_before=target.share,
        share_after=None if target.id in covered else after,
        time_after_us=target.time_us / gain,
        gain=gain,
        tried=len(mine),
        kept=kept[-1].number if kept else None,
        state=_state(night, target, covered, gain),
    )


def _state(night: Night, target: Target, covered: dict[str, str], gain: float) -> str:
    refused = dict(night.unjudgeable).get(target.id)
    if refused:
        return f"cannot be judged: {refused}"
    if target.id in covered:
        return f"now inside {covered[target.id]}"
    if target.time_us > 0 and target.floor_us * gain / target.time_us >= DONE_AT_BOUND:
        return "at its bound"
    parked = [one.line for one in night.said if one.line.startswith(f"{target.id} is parked: ")]
    if parked:
        return parked[-1].removeprefix(f"{target.id} is ")
    return "" if night.of_target(target.id) else "not tried"


def _gain(night: Night, target: str) -> float:
    return gained([one.experiment for one in night.of_target(target) if one.kept])


@dataclass(frozen=True)
class FailureKind:
    """One way in which candidates failed."""

    status: str
    where: str  # a stage or a guard
    count: int
    example: Trial


def failures(night: Night) -> tuple[FailureKind, ...]:
    """The failures by kind, the most frequent first; each with its latest example."""
    failed = [one for one in night.trials if one.experiment.status not in NOT_FAILED]
    kinds = Counter((one.status, where_of(one)) for one in failed)
    latest = {(one.status, where_of(one)): one for one in failed}
    return tuple(FailureKind(*kind, count, latest[kind]) for kind, count in kinds.most_common())


def where_of(trial: Trial) -> str:
    """The guard or the stage at which it failed."""
    verdict = trial.experiment.verdict
    return verdict.guard or str(verdict.stage or "") if verdict else ""


@dataclass(frozen=True)
class CostLine:
    """What one proposer cost; dollars are None where nobody knows the price."""

    proposer: str
    experiments: int
    kept: int
    calls: int
    tokens: int
    dollars: float | None


def costs(night: Night) -> tuple[CostLine, ...]:
    """What the proposers cost, one line each."""
    return tuple(_cost_line(night, name) for name in sorted({one.proposer for one in night.trials}))


def _cost_line(night: Night, proposer: str) -> CostLine:
    mine = [one for one in night.trials if one.proposer == proposer]
    prices = [one.usage.cost_usd for one in mine]
    return CostLine(
        proposer=proposer or "unknown",
        experiments=len(mine),
        kept=sum(one.kept for one in mine),
        calls=sum(one.usage.calls for one in mine),
        tokens=sum(one.usage.tokens for one in mine),
        dollars=None if None in prices else sum(price for price in prices if price is not None),
    )


@dataclass(frozen=True)
class MachineEvent:
    """Something that happened to the session from outside."""

    at: str  # UTC, ISO
    what: str


def machine_events(night: Night) -> tuple[MachineEvent, ...]:
    """Starts, interruptions, trouble with the machine and what the session said of it, in the order of time."""
    runs = [MachineEvent(at, "resumed" if number else "started") for number, (at, _) in enumerate(night.runs)]
    trouble = [_trouble(one) for one in night.trials if one.experiment.status in OF_THE_MACHINE]
    told = [MachineEvent(one.at, one.line) for one in night.said if not one.line.startswith(ROUTINE)]
    watched = [MachineEvent(at, what) for at, what in night.events]
    return tuple(sorted(dict.fromkeys([*runs, *trouble, *watched, *told]), key=lambda event: event.at))


def _trouble(trial: Trial) -> MachineEvent:
    assert trial.experiment.status is not None
    what = OF_THE_MACHINE[trial.experiment.status]
    moment = trial.experiment.finished_at or trial.experiment.started_at
    return MachineEvent(moment, f"experiment {trial.number}: {what}: {trial.reason}")


@dataclass(frozen=True)
class NextStep:
    """Something worth doing now."""

    why: str
    command: str


def next_steps(night: Night) -> tuple[NextStep, ...]:
    """What to do next, the most useful first."""
    name, believed = night.name, headline(night)
    if night.status.pid:
        return (NextStep("it is still running: look at it live", "overnight dashboard"),)
    steps = []
    if night.kept and (night.verified is None or night.verified_is_old):
        steps.append(NextStep("measure the whole model with what is kept", f"overnight verify {name}"))
    if believed.belief is Belief.BROKEN:
        steps.append(NextStep("find the kernel that breaks the model", f"overnight verify {name} --bisect"))
    if night.kept:
        steps.append(NextStep("read the kept kernels, one commit each", f"git log -p overnight/{name}"))
        if believed.belief in {Belief.FASTER, Belief.UNVERIFIED}:
            steps.append(NextStep("put them on a branch of yours", f"overnight apply {name}"))
            command = f"overnight export {name}-kernels --session {name}"
            steps.append(NextStep("use them elsewhere: a package that needs torch and Triton alone", command))
    steps.append(NextStep("go on where it stopped", f"overnight resume {name} {_more(night)}".rstrip()))
    return tuple(steps)


def _more(night: Night) -> str:
    budget, spent = night.status.budget, night.status.spent
    if budget.experiments is not None and spent.experiments >= budget.experiments:
        return "--experiments +20"
    used_up = budget.hours is not None and spent.active_s >= budget.hours * 3600 * 0.9
    return "--hours +2" if used_up else ""

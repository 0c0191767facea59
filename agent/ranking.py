"""Which target to work on next: share × headroom × chance of a win ÷ cost, a pure function of the journal."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.records import Experiment, RowStatus
from harness.records import Target

DONE_AT_BOUND = 0.92  # of the roofline bound: what is left is not worth a night (design §7)
DECAY = 0.9  # what an attempt one further back still tells
PRIOR_WINS, PRIOR_TRIES = 1.0, 2.0
DEFAULT_COST_S = 30.0
WASTED_STREAK = 5  # invalid or repeated answers in a row after which a target is parked
UNJUDGED = {RowStatus.INVALID_REPLY, RowStatus.DUPLICATE}
REST_EXPERIMENTS = 3
UNRELIABLE = "unreliable"
NO_EVIDENCE = {RowStatus.INTERRUPTED, RowStatus.ENVIRONMENT}


@dataclass(frozen=True)
class Standing:
    """Where one target is now. `time_us` is per call with the kept kernel; shares are of the profiled model's time."""

    target: Target
    time_us: float
    share: float
    chance: float
    cost_s: float
    wasted: int

    @property
    def at_bound(self) -> bool:
        """Whether it runs within 92% of its roofline bound."""
        return self.time_us <= 0 or self.target.floor_us / self.time_us >= DONE_AT_BOUND

    @property
    def headroom(self) -> float:
        """The part of its time that the bound leaves to be saved."""
        return max(0.0, 1.0 - self.target.floor_us / self.time_us) if self.time_us > 0 else 0.0

    @property
    def score(self) -> float:
        """Expected share of the model's time saved per second of work."""
        return self.share * self.headroom * self.chance / self.cost_s


def standing(target: Target, experiments: Sequence[Experiment], cost_s: float) -> Standing:
    """A target's standing after its experiments."""
    mine = [one for one in experiments if one.target == target.id and one.status not in {None, *NO_EVIDENCE}]
    gain = gained(kept(mine))
    return Standing(
        target=target,
        time_us=target.time_us / gain,
        share=target.share / gain,
        chance=_chance(mine),
        cost_s=cost_s,
        wasted=_streak(mine),
    )


def kept(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Those whose kernel stands on the branch."""
    return [one for one in experiments if one.status is RowStatus.KEEP]


def gained(keeps: Sequence[Experiment]) -> float:
    """How many times faster a target runs after its keeps: each was measured against the one before."""
    gain = 1.0
    for one in keeps:
        gain *= one.verdict.timing.speedup_vs_best if one.verdict and one.verdict.timing else 1.0
    return gain


def is_open(one: Standing, parked: frozenset[str]) -> bool:
    """Whether work can still pay: not parked, not at its bound, and its proposer is not going in circles."""
    return one.target.id not in parked and not one.at_bound and one.score > 0 and one.wasted < WASTED_STREAK


def is_unreliable(one: Experiment) -> bool:
    """Whether the machine was too busy or too hot to tell (the judge's word for it)."""
    return one.status is RowStatus.ENVIRONMENT and one.verdict is not None and one.verdict.guard == UNRELIABLE


def environment_streak(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The last experiments in a row that failed because of the machine."""
    streak: list[Experiment] = []
    for one in reversed(experiments):
        if one.status is not RowStatus.ENVIRONMENT:
            break
        streak.insert(0, one)
    return streak


def resting(experiments: Sequence[Experiment]) -> frozenset[str]:
    """Targets that were unreliable twice in a row, until some others were measured since."""
    last: dict[str, list[Experiment]] = {}
    for one in experiments:
        last.setdefault(one.target, []).append(one)
    resting_ones = set()
    for target, mine in last.items():
        since = [one for one in experiments if one.number > mine[-1].number and one.status is not RowStatus.ENVIRONMENT]
        if len(mine) > 1 and all(is_unreliable(one) for one in mine[-2:]) and len(since) < REST_EXPERIMENTS:
            resting_ones.add(target)
    return frozenset(resting_ones)


def _chance(mine: Sequence[Experiment]) -> float:
    weights = [DECAY ** (len(mine) - 1 - place) for place in range(len(mine))]
    wins = sum(weight for weight, one in zip(weights, mine, strict=True) if one.status is RowStatus.KEEP)
    return (PRIOR_WINS + wins) / (PRIOR_TRIES + sum(weights))


def _streak(mine: Sequence[Experiment]) -> int:
    count = 0
    for one in reversed(mine):
        if one.status not in UNJUDGED:
            break
        count += 1
    return count

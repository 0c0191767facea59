"""The next setting of a kernel's TUNABLES to try: near the best one, by what each choice has cost so far.

A kernel's grid is small and a trial costs seconds, so a sweep has ten tries, not a thousand. At that budget this
additive model found slightly better settings than Optuna's tree-structured Parzen estimator, and clearly better ones
than one change at a time (benchmarks/RESULTS.md, "Sweeps"): so there is no optimiser package here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from agent.policy import fingerprint
from agent.records import Attempt, Candidate, RowStatus
from agent.search.archive import speed
from agent.search.settings import Choice, Setting, apply_setting, read_setting

REACH = 2  # entries changed at once
SHRINK = 1.0  # how many average trials each choice's effect is mixed with
CURIOSITY = 0.05  # of a natural logarithm of time: what a choice never tried may turn out to save
UNTRIED = {RowStatus.ENVIRONMENT, RowStatus.INTERRUPTED}
PATIENCE = 6  # tries in a row without a better time, after which a sweep ends
BETTER = 0.005  # smaller differences are noise
FAILED_COST = 1.0  # a setting that does not work counts as this much (natural logarithm) above the mean


@dataclass(frozen=True)
class Trial:
    """One setting that was tried, in order; `speed` (higher is better) is None when it did not work or still runs."""

    setting: Setting
    speed: float | None
    runs: bool = False


def next_setting(trials: Sequence[Trial]) -> Setting | None:
    """What to try next; None when the grid is done, nothing works or the last tries found nothing better."""
    best = max((one for one in trials if one.speed), key=lambda one: one.speed or 0.0, default=None)
    if best is None or losing_streak(trials) >= PATIENCE:
        return None
    tried = {one.setting.text for one in trials}
    open_ones = [one for one in _near(best.setting) if one.text not in tried]
    cost = _effects(trials)
    return min(open_ones, key=lambda one: _cost(one, cost), default=None)


def sweep_of(base: Attempt, attempts: Sequence[Attempt], running: Sequence[Candidate]) -> Setting | None:
    """The next setting of a kernel, from all attempts on files that differ from it in their TUNABLES alone."""
    shape = _shape(base.source)
    tried = [one for one in attempts if one.status not in UNTRIED and _shape(one.source) == shape]
    trials = [(read_setting(one.source), speed(one), False) for one in tried]
    trials += [(read_setting(one.source), None, True) for one in running if _shape(one.source) == shape]
    return next_setting([Trial(setting, found, runs) for setting, found, runs in trials if setting])


@lru_cache(maxsize=4096)
def _shape(source: str) -> str:
    """What all settings of one file share."""
    setting = read_setting(source)
    if setting is None:
        return fingerprint(source)
    ordered = {name: tuple(sorted(entry, key=repr)) for name, entry in setting.choices.items()}
    return fingerprint(apply_setting(source, Setting(ordered, {name: entry[0] for name, entry in ordered.items()})))


def losing_streak(trials: Sequence[Trial]) -> int:
    """Tries since the last that was better than all before it; the first is no try of a sweep."""
    best, streak = 0.0, 0
    for place, one in enumerate(one for one in trials if not one.runs):
        won = (one.speed or 0.0) > best * (1 + BETTER)
        best = max(best, one.speed or 0.0)
        streak = 0 if won or place == 0 else streak + 1
    return streak


def _near(best: Setting) -> Iterator[Setting]:
    """Settings that differ from the best in one entry, then in two."""
    for count in range(1, REACH + 1):
        for names in combinations(best.names, count):
            others = [[choice for choice in best.choices[name] if choice != best.current[name]] for name in names]
            for chosen in product(*others):
                changed = best
                for name, choice in zip(names, chosen, strict=True):
                    changed = changed.with_choice(name, choice)
                yield changed


def _effects(trials: Sequence[Trial]) -> Mapping[tuple[str, Choice], float]:
    """What each choice adds to the logarithm of the time, shrunk to nothing where it was tried little."""
    known = [-math.log(one.speed) for one in trials if one.speed]
    mean = sum(known) / len(known)
    found: dict[tuple[str, Choice], list[float]] = {}
    for one in (one for one in trials if not one.runs):
        cost = -math.log(one.speed) - mean if one.speed else FAILED_COST
        for name in one.setting.names:
            found.setdefault((name, one.setting.current[name]), []).append(cost)
    return {
        key: sum(costs) / (len(costs) + SHRINK) - CURIOSITY / math.sqrt(len(costs) + 1) for key, costs in found.items()
    }


def _cost(setting: Setting, effects: Mapping[tuple[str, Choice], float]) -> float:
    return sum(effects.get((name, setting.current[name]), -CURIOSITY) for name in setting.names)

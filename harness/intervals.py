"""Statistics of paired timings: log-ratios of A B B A quads, and a bootstrap interval clustered by process. Pure.

Identical kernels in two processes differ by more than the spread within one process says (±30% on a shared CPU,
facts.md), so processes are resampled first and quads within them second.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

BOOTSTRAP_DRAWS = 2000
MIN_TAIL = 0.0025
MIN_FREEDOM = 2
T_TAILS = (0.025, 0.01, 0.005, 0.0025)
T_QUANTILES = {
    2: (4.303, 6.965, 9.925, 14.09),
    3: (3.182, 4.541, 5.841, 7.453),
    4: (2.776, 3.747, 4.604, 5.598),
    5: (2.571, 3.365, 4.032, 4.773),
    6: (2.447, 3.143, 3.707, 4.317),
}
"""One-sided quantiles of Student's distribution by degrees of freedom, at T_TAILS (standard tables)."""


@dataclass(frozen=True)
class Interval:
    """A ratio of times (above 1: the candidate is faster) with its confidence bounds."""

    ratio: float
    low: float
    high: float


def quad_log_ratio(first_a: float, first_b: float, second_b: float, second_a: float) -> float:
    """ln(A/B) of one A B B A quad in any unit of time; a linear drift over the quad cancels."""
    times = (first_a, first_b, second_b, second_a)
    if any(not time > 0 or math.isinf(time) for time in times):
        raise ValueError(f"times must be positive and finite, got {times}")
    return 0.5 * (math.log(first_a) + math.log(second_a) - math.log(first_b) - math.log(second_b))


def tail(trials: int, level: float = 0.95) -> float:
    """One-sided tail of the interval, Bonferroni-corrected for `trials` candidates judged before on this target."""
    return max(MIN_TAIL, (1 - level) / 2 / (1 + max(trials, 0)))


def clustered_interval(processes: Sequence[Sequence[float]], *, trials: int = 0, seed: int = 0) -> Interval:
    """Interval of the mean over processes of the median log-ratio within each; at least one quad per process.

    A bootstrap over three clusters alone is too narrow, so the interval also holds Student's over the processes.
    """
    if not processes or any(not quads for quads in processes):
        raise ValueError("every process needs at least one quad")
    source = random.Random(seed)
    centre = fmean(median(quads) for quads in processes)
    draws = sorted(_resampled(processes, source) for _ in range(BOOTSTRAP_DRAWS))
    cut = min(len(draws) // 2, int(tail(trials) * len(draws)))
    reach = student_reach([median(quads) for quads in processes], tail(trials))
    low, high = min(draws[cut], centre - reach), max(draws[-1 - cut], centre + reach)
    return Interval(math.exp(centre), math.exp(low), math.exp(high))


def student_reach(centres: Sequence[float], one_sided_tail: float) -> float:
    """Half the width of Student's interval for the mean of some process medians; 0 below three, too few for a keep."""
    freedom = len(centres) - 1
    if freedom < MIN_FREEDOM:
        return 0.0
    column = next((i for i, known in enumerate(T_TAILS) if known <= one_sided_tail), len(T_TAILS) - 1)
    quantile = T_QUANTILES[min(freedom, max(T_QUANTILES))][column]
    return quantile * stdev(centres) / math.sqrt(len(centres))


def _resampled(processes: Sequence[Sequence[float]], source: random.Random) -> float:
    chosen = source.choices(processes, k=len(processes))
    return fmean(median(source.choices(quads, k=len(quads))) for quads in chosen)


def process_noise(log_ratios: Sequence[float]) -> float:
    """Relative A/A noise: root mean square of the log-ratios between fresh processes of one kernel."""
    if not log_ratios:
        raise ValueError("noise needs at least one pair of processes")
    return math.exp(math.sqrt(fmean(value * value for value in log_ratios))) - 1


def geometric_mean(intervals: Sequence[Interval]) -> Interval:
    """The interval of several cases together: each case counts the same."""

    def mean(values: Sequence[float]) -> float:
        return math.exp(fmean(math.log(value) for value in values))

    return Interval(
        mean([item.ratio for item in intervals]),
        mean([item.low for item in intervals]),
        mean([item.high for item in intervals]),
    )


def bar(min_gain: float, noise: float) -> float:
    """The ratio that the lower bound must exceed before a keep (design §5)."""
    return 1 + max(min_gain, 2 * noise)

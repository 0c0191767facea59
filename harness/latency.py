"""Latency of several ways to run one model, interleaved: medians, and ratios paired round by round.

A round times every mode once, in a rotating order, so that drift of the machine meets all of them alike. Intervals
are 95% percentile bootstraps over rounds of one process: they do not cover what differs between processes (on a shared
CPU ±30%, facts of 2026-11-30), which is why only ratios within one run are compared.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Samples = NDArray[np.float64]
Call = Callable[[], object]

RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_ROUNDS = 8
GPU_SAMPLE_MS = 5.0  # calls are batched to this length: a synchronisation costs about 10 µs


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap interval, in the unit of the samples."""

    median: float
    low: float
    high: float


def measure(
    calls: Mapping[str, Call], *, on_gpu: bool, budget_s: float, max_rounds: int = 400
) -> dict[str, list[float]]:
    """Milliseconds per call for every mode, one entry per round; modes must be warm already.

    Stops after `budget_s` seconds, but not before MIN_ROUNDS rounds.
    """
    repeats = {mode: _repeats(call) if on_gpu else 1 for mode, call in calls.items()}
    samples: dict[str, list[float]] = {mode: [] for mode in calls}
    order = list(calls)
    deadline = time.perf_counter() + budget_s
    for round_index in range(max_rounds):
        if round_index >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for mode in order:
            samples[mode].append(_time_ms(calls[mode], repeats[mode], on_gpu=on_gpu))
        order = [*order[1:], order[0]] if round_index % 2 else order[::-1]
    return samples


def _repeats(call: Call) -> int:
    return max(1, round(GPU_SAMPLE_MS / max(_time_ms(call, 3, on_gpu=True), 1e-3)))


def _time_ms(call: Call, repeats: int, *, on_gpu: bool) -> float:
    """Wall-clock milliseconds per call, device work included."""
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of samples and its interval; raises ValueError without samples."""
    return _interval(lambda values: np.median(values, axis=-1), np.asarray([samples], dtype=np.float64), seed)


def speedup(ours: Sequence[float], other: Sequence[float], seed: int = 0) -> Interval:
    """Median of `other` over median of `ours`, with the interval that resampling whole rounds gives."""
    if len(ours) != len(other):
        raise ValueError(f"paired rounds are needed, got {len(ours)} and {len(other)}")
    pairs = np.asarray([ours, other], dtype=np.float64)
    return _interval(lambda values: np.median(values[1], axis=-1) / np.median(values[0], axis=-1), pairs, seed)


def _interval(statistic: Callable[[Samples], Samples], rounds: Samples, seed: int) -> Interval:
    """`rounds` is [series, rounds]; the same rounds are drawn for all series."""
    count = rounds.shape[1]
    if not count:
        raise ValueError("an interval needs at least one sample")
    draws = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(statistic(rounds[:, draws]), [tail, 100 - tail])
    return Interval(float(np.squeeze(statistic(rounds))), float(low), float(high))

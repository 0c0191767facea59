"""The geometry of the pages' charts: every experiment, the model's latency over time, one benchmark's spread. Pure.

Numbers become pixels here and nothing else; the templates draw them, so that text is escaped in one place only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from agent.morning.headline import mode_name
from agent.morning.night import Night, Trial, seconds
from harness.records import Timing

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
MAX_LINES = 8  # running-best lines: more would be unreadable
STRIP_WIDTH, STRIP_ROW = 360, 16


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    """One experiment; `failed` ones have no speed and stand at the bottom."""

    x: float
    y: float
    number: int
    kind: str  # a CSS class
    label: str


@dataclass(frozen=True)
class Line:
    """A step line, as the points of an SVG polyline."""

    points: str
    label: str
    end_y: float
    colour: int


@dataclass(frozen=True)
class Chart:
    """One chart, ready to be drawn; `words` says the same for those who cannot see it."""

    title: str
    words: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    lines: tuple[Line, ...]
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value, kept within the axis."""
        low, high, this = (math.log(one) if self.log else one for one in (self.low, self.high, value))
        share = (this - low) / (high - low) if high > low else 0.5
        return round(self.start + (self.end - self.start) * min(max(share, 0.0), 1.0), 1)


def progress_chart(night: Night) -> Chart | None:
    """Every experiment by its speed against PyTorch, and the running best of each target."""
    if not night.trials:
        return None
    speeds = [speed for one in night.trials if (speed := speed_of(one))]
    low, high = min([*speeds, 1.0]) / 1.1, max([*speeds, 1.0]) * 1.1
    x = Scale(0, max(len(night.trials), 2) + 1, LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM - 14, TOP, log=True)
    dots = tuple(_dot(one, x, y) for one in night.trials)
    lines = tuple(
        Line(_steps(points, x, y, night.trials[-1].number), name, y(points[-1][1]), index)
        for index, (name, points) in enumerate(running_best(night)[:MAX_LINES])
    )
    kept = len(night.kept)
    return Chart(
        title="Every experiment, and the running best of each target",
        words=f"{len(night.trials)} experiments, {kept} kept. Higher is faster than PyTorch; 1 is PyTorch itself.",
        x_label="experiment",
        x_ticks=tuple(Tick(x(one), f"{one:g}") for one in nice_ticks(1, night.trials[-1].number)),
        y_ticks=tuple(Tick(y(one), f"{one:g}x") for one in log_ticks(low, high)),
        dots=dots,
        lines=lines,
    )


def speed_of(trial: Trial) -> float | None:
    """Times as fast as PyTorch eager; None where it was not timed."""
    speed = trial.timing.speedup_vs_pytorch if trial.timing else None
    return speed if speed and math.isfinite(speed) and speed > 0 else None


def running_best(night: Night) -> list[tuple[str, list[tuple[int, float]]]]:
    """By target with a keep: (experiment, best speed against PyTorch so far); the most gained first."""
    found = []
    for target in dict.fromkeys(one.target for one in night.kept):
        points: list[tuple[int, float]] = []
        for one in night.of_target(target):
            speed = speed_of(one)
            if one.kept and speed is not None:
                points.append((one.number, speed))
        if points:
            found.append((target, points))
    return sorted(found, key=lambda item: -item[1][-1][1])


def _dot(one: Trial, x: Scale, y: Scale) -> Dot:
    speed = speed_of(one)
    place = y(speed) if speed else HEIGHT - BOTTOM - 4.0
    said = f"{speed:.3g} times PyTorch" if speed else "not timed"
    kind = "keep" if one.kept else "discard" if speed else "failed"
    return Dot(x(one.number), place, one.number, kind, f"{one.number} {one.status}: {one.target}, {said}")


def _steps(points: Sequence[tuple[float, float]], x: Scale, y: Scale, until: float) -> str:
    drawn = []
    for (start, value), (end, _) in zip(points, [*points[1:], (until, 0.0)], strict=True):
        drawn += [f"{x(start)},{y(value)}", f"{x(max(start, end))},{y(value)}"]
    return " ".join(drawn)


def latency_points(night: Night) -> list[tuple[float, float]]:
    """(hours since the start, model ms) after each keep that was measured."""
    if not night.runs:
        return []
    began = seconds(night.runs[0][0])
    measured = [one.experiment for one in night.kept if one.experiment.model_ms and one.experiment.finished_at]
    return [((seconds(str(one.finished_at)) - began) / 3600, float(one.model_ms or 0)) for one in measured]


def references_ms(night: Night) -> list[tuple[str, float]]:
    """The other ways to run the model, as verified last: (name, median ms)."""
    modes = night.verified.modes if night.verified else ()
    return [(mode_name(one.mode), one.median_ms) for one in modes if one.median_ms and one.mode != "overnight"]


def time_unit(hours: float) -> tuple[str, float]:
    """The unit that so many hours are best shown in, and how many of it an hour is."""
    if hours >= 1.5:
        return "h", 1.0
    return ("min", 60.0) if hours > 0.03 else ("s", 3600.0)


def latency_chart(night: Night) -> Chart | None:
    """The model's time per forward over the night, beside the other ways to run it."""
    points, others = latency_points(night), references_ms(night)
    if not points:
        return None
    values = [value for _, value in points] + [value for _, value in others]
    until = max(points[-1][0] * 1.05, 1e-3)
    x = Scale(0, until, LEFT, WIDTH - RIGHT)
    y = Scale(0, max(values) * 1.1, HEIGHT - BOTTOM, TOP)
    flat = [
        Line(f"{LEFT},{y(value)} {WIDTH - RIGHT},{y(value)}", f"{name} {value:.3g} ms", y(value), index + 1)
        for index, (name, value) in enumerate(others)
    ]
    ours = Line(_steps(points, x, y, until), f"with the kept kernels {points[-1][1]:.3g} ms", y(points[-1][1]), 0)
    unit, factor = time_unit(until)
    return Chart(
        title="The model's time per forward",
        words=f"From {points[0][1]:.3g} ms after the first keep to {points[-1][1]:.3g} ms after the last one.",
        x_label=f"time since the start, {unit}",
        x_ticks=tuple(Tick(x(one / factor), f"{one:g}") for one in nice_ticks(0, until * factor)),
        y_ticks=tuple(Tick(y(one), f"{one:g} ms") for one in nice_ticks(0, max(values) * 1.1)),
        dots=tuple(Dot(x(at), y(value), 0, "keep", f"{value:.3g} ms") for at, value in points),
        lines=(ours, *flat),
    )


@dataclass(frozen=True)
class Strip:
    """The spread of one benchmark: a row of measurements for each pair of processes, and the interval."""

    rows: tuple[tuple[float, ...], ...]  # pixels
    middles: tuple[float, ...]
    low: float
    high: float
    one: float
    ticks: tuple[Tick, ...]
    height: int
    words: str
    width: int = STRIP_WIDTH
    row: int = STRIP_ROW


def strip(timing: Timing | None) -> Strip | None:
    """How the single measurements of incumbent ÷ candidate scatter around the verdict."""
    rows = [[one for one in row if math.isfinite(one) and one > 0] for row in (timing.ratios if timing else ())]
    rows = [row for row in rows if row]
    if timing is None or not rows:
        return None
    everything = [*(one for row in rows for one in row), timing.ci_low, timing.ci_high, 1.0]
    low, high = min(everything) * 0.99, max(everything) * 1.01
    x = Scale(low, high, 6, STRIP_WIDTH - 6)
    count = sum(map(len, rows))
    return Strip(
        rows=tuple(tuple(x(one) for one in row) for row in rows),
        middles=tuple(x(median(row)) for row in rows),
        low=x(timing.ci_low),
        high=x(timing.ci_high),
        one=x(1.0),
        ticks=tuple(Tick(x(one), f"{one:g}") for one in nice_ticks(low, high)),
        height=STRIP_ROW * len(rows) + 22,
        words=f"{count} measurements in {len(rows)} pairs of processes, from {min(map(min, rows)):.3g} to"
        f" {max(map(max, rows)):.3g}; 95% interval {timing.ci_low:.3g} to {timing.ci_high:.3g}",
    )


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, about `wanted` of them."""
    span = max(high - low, 1e-12)
    unit = 10 ** math.floor(math.log10(span / wanted))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [round(one * step, 12) for one in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis."""
    if high / low < 4:
        return [one for one in nice_ticks(low, high) if one > 0]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [one for power in powers for one in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= one <= high]

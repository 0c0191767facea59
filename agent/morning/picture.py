"""progress.png, drawn with matplotlib: every experiment with the running best, and the model's latency over time."""

import io
import logging
import warnings
from typing import Any

from agent.morning.charts import latency_points, references_ms, running_best, speed_of, time_unit
from agent.morning.headline import headline
from agent.morning.night import Night
from agent.visible import one_line

GREY, GREEN, INK = "#9aa3ad", "#1a7f37", "#24292f"
COLOURS = ("#1a7f37", "#0969da", "#9a6700", "#8250df", "#bf3989", "#1b7c83", "#bc4c00", "#57606a")
MAX_LABELS = 12


def picture(night: Night) -> bytes:
    """A PNG of 1600 by 1000 pixels. No text in it is read as a formula, whatever a candidate calls itself."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character that the font does not have is drawn as a box
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, height_ratios=(3, 2))
        figure.suptitle(f"{night.name}: {headline(night).sentence}", fontsize=15, color=INK, parse_math=False)
        _draw_experiments(above, night)
        _draw_latency(below, night)
        content = io.BytesIO()
        figure.savefig(content, format="png", metadata={"Software": "overnight"})
    return content.getvalue()


def _draw_experiments(axes: Any, night: Night) -> None:
    timed = [(one.number, speed, one.kept) for one in night.trials if (speed := speed_of(one))]
    for is_kept, colour, label in ((False, GREY, "discarded"), (True, GREEN, "kept")):
        dots = [(number, speed) for number, speed, kept in timed if kept is is_kept]
        if dots:
            axes.scatter(*zip(*dots, strict=True), s=46 if is_kept else 18, color=colour, label=label, zorder=3)
    failed = [one.number for one in night.trials if speed_of(one) is None]
    floor = min([speed for _, speed, _ in timed] + [1.0]) / 1.08
    if failed:
        axes.scatter(failed, [floor] * len(failed), s=16, marker="x", color="#cf222e", label="refused or failed")
    last = night.trials[-1].number if night.trials else 1
    for index, (target, points) in enumerate(running_best(night)[: len(COLOURS)]):
        numbers = [number for number, _ in points] + [last]
        speeds = [speed for _, speed in points] + [points[-1][1]]
        axes.step(numbers, speeds, where="post", color=COLOURS[index], linewidth=1.6, label=f"best {target}")
    for one in night.kept[:MAX_LABELS]:
        if speed := speed_of(one):
            words = one_line(one.description, 44)
            place = {"xytext": (4, 6), "textcoords": "offset points", "fontsize": 8, "rotation": 20}
            axes.annotate(words, (one.number, speed), color=INK, parse_math=False, **place)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="experiment", ylabel="times as fast as PyTorch eager")
    axes.margins(y=0.15)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.yaxis.set_minor_formatter("{x:.2g}x")
    _finish(axes, f"{len(night.trials)} experiments, {len(night.kept)} kept")


def _draw_latency(axes: Any, night: Night) -> None:
    points = latency_points(night)
    unit, factor = time_unit(points[-1][0] if points else 1.0)
    if points:
        hours, values = zip(*points, strict=True)
        axes.step(
            [one * factor for one in hours],
            values,
            where="post",
            color=GREEN,
            linewidth=2,
            marker="o",
            label="with the kept kernels",
        )
    for index, (name, value) in enumerate(references_ms(night)):
        axes.axhline(value, color=COLOURS[index + 1], linewidth=1, linestyle="--", label=f"{name}: {value:.3g} ms")
    if points or references_ms(night):
        axes.set_ylim(bottom=0)
    else:
        axes.text(0.5, 0.5, "nothing was kept, so the model was not measured again", ha="center", color=INK)
    axes.set(xlabel=f"time since the start, {unit}", ylabel="ms per forward")
    _finish(axes, "The model")


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best", framealpha=0.9)

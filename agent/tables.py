"""What people read in the terminal: the ranking, a verdict, the whole model against its alternatives."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent.visible import visible
from harness.records import ModeMeasurement, ProfileReport, StageStatus, Target, Verdict, VerifyReport

if TYPE_CHECKING:
    from rich.console import Console

STAGE_STYLE = {StageStatus.PASS: "green", StageStatus.FAIL: "red", StageStatus.NOT_RUN: "dim"}


def print_ranking(console: "Console", report: ProfileReport) -> None:
    """The ranking by Amdahl's law: a disjoint cover, fusions nested below the first target they cover."""
    from rich.table import Table

    title = f"{report.model} on {report.device_name} ({report.mode}): {report.total_ms:.3f} ms per forward"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("target", no_wrap=True)
    table.add_column("what", overflow="ellipsis")
    for heading in ("sites", "share", "µs/call", "floor µs", "model could be"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for target, nested in nested_targets(report.targets):
        _add_target(table, target, nested=nested)
    table.add_section()
    table.add_row("idle", "device idle or launching", "", _percent(report.idle_share), "", "", "", "")
    table.add_row("uncaptured", "not in any graph", "", _percent(report.uncaptured_share), "", "", "", "")
    console.print(table)
    for note in report.notes:
        console.print(f"  note: {visible(note)}", style="dim", highlight=False, markup=False)


def nested_targets(targets: tuple[Target, ...]) -> list[tuple[Target, bool]]:
    """The disjoint cover by what it could give, each followed by the fusions that start with it."""
    cover = sorted((target for target in targets if not target.members), key=lambda target: -target.model_gain())
    fusions = sorted((target for target in targets if target.members), key=lambda target: -target.model_gain())
    rows: list[tuple[Target, bool]] = []
    placed: set[str] = set()
    for target in cover:
        rows.append((target, False))
        mine = [fusion for fusion in fusions if target.id in fusion.members and fusion.id not in placed]
        placed.update(fusion.id for fusion in mine)
        rows.extend((fusion, True) for fusion in mine)
    return rows + [(fusion, True) for fusion in fusions if fusion.id not in placed]


def _add_target(table: "object", target: Target, *, nested: bool) -> None:
    from rich.table import Table

    assert isinstance(table, Table)
    gain = target.model_gain()
    table.add_row(
        ("└ " if nested else "") + _safe(target.id),
        _safe(target.title),
        str(len(target.call_sites)),
        _percent(target.share),
        f"{target.time_us:.1f}",
        f"{target.floor_us:.1f}",
        f"{1 / (1 - min(gain, 0.99)):.2f}x",
        "launch-bound" if target.launch_bound else "",
        style="dim" if nested else None,
    )


def print_verdict(console: "Console", verdict: Verdict) -> None:
    """One line a stage, then the sentence and the figures."""

    for name, stage in verdict.stages.items():
        style = STAGE_STYLE[stage.status]
        console.print(
            f"  {name:<12}[{style}]{stage.status:<8}[/] {stage.seconds:6.2f} s  {_safe(stage.detail)}", highlight=False
        )
    console.print(f"[bold]{verdict.status}[/] {_safe(verdict.target)}: {_safe(verdict.detail)}", highlight=False)
    if verdict.guard:
        console.print(f"  guard: {verdict.guard}", highlight=False)
    if verdict.blame and not verdict.accepted:
        console.print(f"  whose fault: {verdict.blame}", highlight=False)
    if timing := verdict.timing:
        console.print(
            f"  {timing.candidate_us:.2f} µs; eager {timing.eager_us:.2f} µs ({timing.speedup_vs_pytorch:.3f}x); "
            f"{timing.incumbent or 'incumbent'} {timing.incumbent_us:.2f} µs ({timing.speedup_vs_best:.3f}x, "
            f"95% {timing.ci_low:.3f} to {timing.ci_high:.3f}); A/A noise {timing.noise:.2%}",
            highlight=False,
        )
    console.print(f"  sandbox: {', '.join(verdict.sandbox) or 'none'}", style="dim", highlight=False)


def print_verify(console: "Console", report: VerifyReport) -> None:
    """The model with the kept kernels against the ways a user has today."""
    from rich.table import Table

    table = Table(title=f"{report.model} on {report.device_name}", title_justify="left", header_style="bold")
    table.add_column("mode")
    for heading in ("median ms", "95% interval", "peak MB", "ours is"):
        table.add_column(heading, justify="right")
    ours = next((mode.median_ms for mode in report.modes if mode.mode == "overnight"), None)
    for mode in report.modes:
        table.add_row(*_mode_row(mode, ours))
    console.print(table)
    outputs = "equal within tolerance" if report.outputs_ok else "[red]DIFFERENT[/]"
    console.print(f"outputs {outputs} (max error {report.max_error:.3g})", highlight=False)
    console.print(
        f"call sites: {report.sites.applied} with kept kernels, {report.sites.fallback} fell back", highlight=False
    )
    if report.text is not None:
        console.print(
            f"text: {report.text.top1:.1%} of {report.text.steps} teacher-forced steps choose the same word, "
            f"perplexity {report.text.perplexity:.4g} (eager {report.text.perplexity_eager:.4g})",
            highlight=False,
        )
    if report.model_speedup is not None:
        console.print(f"model speedup over the best other mode: {report.model_speedup:.3f}x", highlight=False)
    if report.detail:
        console.print(_safe(report.detail), style="dim", highlight=False)
    for suspect in report.suspects:
        console.print(f"suspect: {_safe(suspect)}", highlight=False)


def _mode_row(mode: ModeMeasurement, ours: float | None) -> tuple[str, ...]:
    if mode.median_ms is None:
        return (mode.mode, "not run", _safe(mode.reason or ""), "", "")
    interval = (
        f"{mode.ci_low:.3f} to {mode.ci_high:.3f}" if mode.ci_low is not None and mode.ci_high is not None else ""
    )
    memory = f"{mode.peak_memory_mb:.0f}" if mode.peak_memory_mb is not None else ""
    return (mode.mode, f"{mode.median_ms:.3f}", interval, memory, f"{mode.median_ms / ours:.3f}x" if ours else "")


def _percent(share: float) -> str:
    return f"{share:.1%}"


def print_results(console: "Console", rows: Sequence[Mapping[str, int | float | str | None]]) -> None:
    """The columns of results.tsv that fit a terminal."""
    from rich.table import Table

    table = Table(header_style="bold")
    shown = ("experiment", "status", "target", "latency_us", "speedup_vs_pytorch", "speedup_vs_best", "description")
    for name in shown:
        table.add_column(name, justify="left" if name in {"status", "target", "description"} else "right")
    for row in rows:
        table.add_row(*(_safe("" if row[name] is None else str(row[name])) for name in shown))
    console.print(table)


def _safe(text: str) -> str:
    """What a candidate may have written: no terminal command and no markup is left in it."""
    from rich.markup import escape

    return escape(visible(text))

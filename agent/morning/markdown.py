"""report.md: the session in a page of text; what candidates and models wrote is escaped."""

from agent.morning.headline import headline, mode_name
from agent.morning.night import Night, Trial
from agent.morning.summary import TargetLine, costs, failures, machine_events, next_steps, target_lines
from agent.visible import markdown_text
from harness.records import VerifyReport


def markdown(night: Night) -> str:
    """The whole page."""
    sections = [
        _opening(night),
        _section("The model", _verify_table(night.verified) if night.verified else []),
        _section("Targets, before and after", _targets(night)),
        _section("Experiments", _experiments(night)),
        _section("Failures by kind", _failures(night)),
        _section("Targets that cannot be judged", [f"- {one}: {markdown_text(why)}" for one, why in night.unjudgeable]),
        _section("Cost", _costs(night)),
        _section("Machine events", [f"- {one.at} {markdown_text(one.what)}" for one in machine_events(night)]),
        _section("What to do next", [f"- {one.why}: `{one.command}`" for one in next_steps(night)]),
        _section(
            "Notes of the profile", [f"- {markdown_text(one)}" for one in night.profile.notes] if night.profile else []
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _opening(night: Night) -> str:
    top = headline(night)
    lines = [f"# Session {markdown_text(night.name)}", "", f"**{markdown_text(top.sentence)}**"]
    if top.gain:
        lines += ["", f"{top.gain.ratio:.4g}x (95% {top.gain.low:.4g} to {top.gain.high:.4g}) against {top.against}:"]
        lines[-1] += f" {top.before_ms or 0:.4g} ms before, {top.after_ms or 0:.4g} ms now."
    lines += ["", *(f"- but: {markdown_text(one)}" for one in top.caveats)]
    lines += [f"- {markdown_text(line)}" for line in night.status.lines()]
    return "\n".join(lines)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"## {title}", "", *lines]) if lines else ""


def _table(heads: str, rows: list[str]) -> list[str]:
    rule = "|".join("---" for _ in heads.split("|"))
    return [f"| {heads} |", f"|{rule}|", *rows] if rows else []


def _verify_table(report: VerifyReport) -> list[str]:
    rows = []
    for one in report.modes:
        if one.median_ms is None:
            rows.append(f"| {mode_name(one.mode)} | not run | {markdown_text(one.reason or '')} | |")
            continue
        versus = report.versus.get(one.mode)
        ours = f"{versus.ratio:.3f}x ({versus.low:.3f} to {versus.high:.3f})" if versus else ""
        interval = f"{one.ci_low:.4g} to {one.ci_high:.4g}" if one.ci_low and one.ci_high else ""
        rows.append(f"| {mode_name(one.mode)} | {one.median_ms:.4g} | {interval} | {ours} |")
    outputs = "equal within tolerance" if report.outputs_ok else "DIFFERENT"
    sites = f"{report.sites.applied} call sites run kept kernels, {report.sites.fallback} fell back"
    said = f"Outputs {outputs} (max error {report.max_error:.3g}); {sites}."
    return [*_table("mode | median ms | 95% | ours is", rows), "", said]


def _targets(night: Night) -> list[str]:
    rows = [_target_row(one) for one in target_lines(night)]
    note = "Shares afterwards are computed from the speedups of the kept kernels, not profiled again."
    return [*_table("target | what | sites | share before | after | µs before | now | floor | state", rows), "", note]


def _target_row(one: TargetLine) -> str:
    after = "" if one.share_after is None else f"{one.share_after:.1%}"
    kept = f"kept {one.kept}" if one.kept else ""
    tried = f"{one.tried} tried" if one.tried else ""
    state = ", ".join(words for words in (kept, markdown_text(one.state), tried) if words)
    target = one.target
    return (
        f"| {'└ ' * one.nested}{markdown_text(target.id)} | {markdown_text(target.title)} | {len(target.call_sites)}"
        f" | {one.share_before:.1%} | {after} | {target.time_us:.1f} | {one.time_after_us:.1f}"
        f" | {target.floor_us:.1f} | {state} |"
    )


def _experiments(night: Night) -> list[str]:
    return _table("# | status | target | against best | 95% | what", [_experiment_row(one) for one in night.trials])


def _experiment_row(one: Trial) -> str:
    timing = one.timing
    speed = f"{timing.speedup_vs_best:.3f}x | {timing.ci_low:.3f} to {timing.ci_high:.3f}" if timing else " | "
    words = "; ".join(markdown_text(part) for part in (one.description, one.reason) if part)
    return f"| {one.number} | {markdown_text(one.status)} | {markdown_text(one.target)} | {speed} | {words} |"


def _failures(night: Night) -> list[str]:
    rows = [
        f"| {one.count} | {one.status} | {one.where} | {one.example.number}: {markdown_text(one.example.reason)} |"
        for one in failures(night)
    ]
    return _table("how many | status | where | the last one", rows)


def _costs(night: Night) -> list[str]:
    rows = []
    for one in costs(night):
        price = "unknown" if one.dollars is None else f"${one.dollars:.2f}"
        name = markdown_text(one.proposer)
        rows.append(f"| {name} | {one.experiments} | {one.kept} | {one.calls} | {one.tokens} | {price} |")
    spent = night.status.spent
    said = f"{spent.active_s / 3600:.2f} active hours, {night.judge_s / 3600:.2f} of them judging."
    return [*_table("proposer | experiments | kept | calls | tokens | dollars", rows), "", said] if rows else [said]

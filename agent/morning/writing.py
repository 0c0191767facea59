"""The report's three files, written whole, and the same for `--json`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.morning.headline import headline
from agent.morning.markdown import markdown
from agent.morning.night import Night
from agent.morning.page import report_page
from agent.morning.picture import picture
from agent.morning.summary import costs, failures, machine_events, next_steps, target_lines
from agent.places import write_whole


@dataclass(frozen=True)
class ReportFiles:
    """Where the report is."""

    text: Path
    picture: Path
    page: Path


def write_report(night: Night, folder: Path) -> ReportFiles:
    """Write report.md, progress.png and report.html into a folder."""
    files = ReportFiles(folder / "report.md", folder / "progress.png", folder / "report.html")
    write_whole(files.text, markdown(night))
    write_whole(files.page, report_page(night))
    write_whole(files.picture, picture(night))
    return files


def report_json(night: Night, files: ReportFiles) -> dict[str, Any]:
    """`overnight report --json`: where the files are, and what they say."""
    return {**night_json(night), "report": str(files.text), "picture": str(files.picture), "page": str(files.page)}


def night_json(night: Night) -> dict[str, Any]:
    """The status, the headline, and what the sections hold."""
    top = headline(night)
    return {
        **night.status.data(),
        "headline": {**asdict(top), "belief": str(top.belief)},
        "targets": [
            {
                "id": one.target.id,
                "share_before": one.share_before,
                "share_after": one.share_after,
                "time_us_before": one.target.time_us,
                "time_us_now": one.time_after_us,
                "tried": one.tried,
                "kept": one.kept,
                "state": one.state,
            }
            for one in target_lines(night)
        ],
        "failures": [
            {"status": one.status, "where": one.where, "count": one.count, "example": one.example.number}
            for one in failures(night)
        ],
        "cost": [asdict(one) for one in costs(night)],
        "events": [asdict(one) for one in machine_events(night)],
        "next": [asdict(one) for one in next_steps(night)],
    }

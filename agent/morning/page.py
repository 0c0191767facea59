"""HTML from templates: escaped always, hidden characters made visible always, no script but our own.

The report is one file that loads nothing: its Content-Security-Policy names the hashes of its own style and script, so
that markup which slipped through escaping could still neither run nor fetch.
"""

import base64
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.morning.cards import cards
from agent.morning.charts import latency_chart, progress_chart
from agent.morning.headline import headline, mode_name
from agent.morning.night import Night
from agent.morning.summary import costs, failures, machine_events, next_steps, target_lines
from agent.visible import visible

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).resolve().parent / "templates"


@lru_cache(maxsize=1)
def environment() -> "Environment":
    """The one way in which a template becomes text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@lru_cache(maxsize=8)
def asset(name: str) -> str:
    """A style sheet or script of ours."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """How a Content-Security-Policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def report_page(night: Night) -> str:
    """report.html."""
    from markupsafe import Markup

    style, script = asset("overnight.css"), asset("report.js")
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            **night_values(night),
            cards=cards(night),
            statuses=sorted({one.status for one in night.trials}),
            style=Markup(style),  # noqa: S704 - our own files, free of candidates' text
            script=Markup(script),  # noqa: S704
            style_hash=source_hash(style),
            script_hash=source_hash(script),
        )
    )


def night_values(night: Night) -> dict[str, Any]:
    """What every page about one session is given."""
    return {
        "night": night,
        "top": headline(night),
        "mode_name": mode_name,
        "progress": progress_chart(night),
        "latency": latency_chart(night),
        "targets": target_lines(night),
        "failures": failures(night),
        "costs": costs(night),
        "events": machine_events(night),
        "steps": next_steps(night),
    }

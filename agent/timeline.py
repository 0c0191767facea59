"""What a session said of itself, with the time: kept beside its journal, so that report and dashboard can tell it.

Not the truth about anything (that is the journal): a line that cannot be written is lost, and the session goes on.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.journal import now_iso
from agent.visible import one_line

TAIL_BYTES = 100_000
EXPERIMENT_LINE = re.compile(r"\s*\d+\s\s")  # the journal has those


@dataclass(frozen=True)
class Said:
    """One line and when it was said (UTC, ISO)."""

    at: str
    line: str


def remember(path: Path, line: str) -> None:
    """Add a line, unless it only repeats an experiment of the journal."""
    if EXPERIMENT_LINE.match(line):
        return
    with suppress(OSError), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{now_iso()} {one_line(line, 1000)}\n")


def said(path: Path) -> tuple[Said, ...]:
    """The last lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    parts = [line.partition(" ") for line in lines]
    return tuple(Said(at, words) for at, _, words in parts if re.fullmatch(r"[\dT:Z-]{20}", at))

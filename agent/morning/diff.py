"""What changed from one kernel file to the next, line by line. Pure."""

import difflib
from dataclasses import dataclass

from agent.visible import excerpt

MAX_LINES = 3000
MAX_CHARS = 200_000
KINDS = {"+": "add", "-": "del", "@": "hunk"}


@dataclass(frozen=True)
class DiffLine:
    """One line with its sign; `kind` is add, del, hunk or same."""

    kind: str
    text: str


def diff_lines(before: str, after: str) -> tuple[DiffLine, ...]:
    """A unified diff; of two very long files only a line that says so, since comparing them could take minutes."""
    old, new = _lines(before), _lines(after)
    if max(len(old), len(new)) > MAX_LINES or max(len(before), len(after)) > MAX_CHARS:
        return (DiffLine("hunk", f"too long to compare ({len(old)} and {len(new)} lines)"),)
    lines = list(difflib.unified_diff(old, new, lineterm="", n=3))[2:]
    return tuple(DiffLine(KINDS.get(line[:1], "same"), line) for line in lines)


def counts(lines: tuple[DiffLine, ...]) -> tuple[int, int]:
    """Lines added and taken out."""
    return sum(line.kind == "add" for line in lines), sum(line.kind == "del" for line in lines)


def _lines(text: str) -> list[str]:
    return excerpt(text, MAX_CHARS * 2).split("\n")

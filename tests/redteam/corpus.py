"""The red-team corpora as the tests use them: agent/redteam.py reads the files."""

from pathlib import Path

from agent.redteam import Kind, Specimen
from agent.redteam import specimens as all_specimens

__all__ = ["Specimen", "specimens"]


def specimens(kind: str) -> list[Specimen]:
    """All files of `cheats` or `honest`."""
    return [one for one in all_specimens(Path(__file__).parent) if one.kind is Kind(kind)]

"""One idea of the playbook: a whole kernel file and the name under which it is tried once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Idea:
    """A candidate before it is bound to a target; `tactic` is unique among the ideas for one target."""

    tactic: str
    backend: str
    source: str
    description: str
    hypothesis: str

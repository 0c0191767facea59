"""Known kernels: a file of kernels/ specialised to a target by an adapter in the target's own signature."""

from collections.abc import Iterator
from pathlib import Path

from agent.proposers.playbook.ideas import Idea
from agent.records import Brief


def ideas(brief: Brief, root: Path) -> Iterator[Idea]:
    """Kernels of `root` whose operation the target is."""
    del brief, root
    return iter(())

"""The one seam to whoever has ideas: a brief in, a proposal out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agent.records import Brief, Experiment, Proposal
from harness.records import Target


class Proposer(Protocol):
    """Anything that turns a brief into one candidate. Deterministic ones resume from `brief.attempts`."""

    @property
    def name(self) -> str:
        """What the `proposer` column of results.tsv says."""
        ...

    def propose(self, brief: Brief) -> Proposal:
        """Propose one edit. Raises agent.errors.ProviderError when it cannot go on (the session stops resumably)."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A proposer with an order of its own (replay): it also chooses the target, instead of the ranking."""

    def next_target(self, targets: Sequence[Target], experiments: Sequence[Experiment]) -> Target | None:
        """Which of `targets` (in ranking order) its next candidate is for; None when it has none left."""
        ...


@runtime_checkable
class Parallel(Protocol):
    """A slow proposer whose `propose` may run in several threads at once: it thinks while the devices work."""

    @property
    def lanes(self) -> int:
        """How many questions it may be asked at a time, at least 1."""
        ...

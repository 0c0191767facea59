"""The one seam to whoever has ideas: a brief in, a proposal out."""

from typing import Protocol

from agent.records import Brief, Proposal


class Proposer(Protocol):
    """Anything that turns a brief into one candidate. Deterministic ones resume where they were from `brief.attempts`."""

    @property
    def name(self) -> str:
        """What the `proposer` column of results.tsv says."""
        ...

    def propose(self, brief: Brief) -> Proposal:
        """Propose one edit. Raises agent.errors.ProviderError when it cannot go on (the session stops resumably)."""
        ...

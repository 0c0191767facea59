"""A seat where a slow proposer thinks while the devices work: one question at a time, several desks side by side."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.executors.base import Answer, Job, Kind
from agent.proposers.base import Proposer
from agent.records import Brief


@dataclass(frozen=True)
class DeskSeat:
    """One thinking thread of a proposer that bears several (agent.proposers.base.Parallel)."""

    current: Callable[[], Proposer]  # the session's, which changed settings may replace

    kinds = frozenset({Kind.PROPOSE})

    @property
    def name(self) -> str:
        """The proposer."""
        return self.current().name

    def run(self, job: Job) -> Answer:
        """Ask."""
        assert isinstance(job.request, Brief)
        return self.current().propose(job.request)

    def fault(self) -> str | None:
        """A proposer that cannot go on stops the session (ProviderError); it is not set aside."""
        return None

    def close(self) -> None:
        """Nothing to end: the proposer watches the stop flag itself."""

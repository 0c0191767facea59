"""The one seam to whoever measures: jobs go to seats, one device each; what they answer comes back as it is done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.records import JudgeRequest, Verdict, VerifyReport, VerifyRequest

Answer = Verdict | VerifyReport


@dataclass(frozen=True)
class Job:
    """One piece of work for a device: judge the candidate of experiment `number`, or measure the model with it."""

    number: int
    request: JudgeRequest | VerifyRequest
    log: Path  # events of the work are written there

    @property
    def measures(self) -> bool:
        """Whether it measures the whole model; such jobs go first, for a keep waits for them."""
        return isinstance(self.request, VerifyRequest)


@dataclass(frozen=True)
class Done:
    """A job's end: an answer, or the failure that is no verdict on the candidate."""

    job: Job
    seat: str
    answer: Answer | None
    error: Exception | None
    seconds: float


class Seat(Protocol):
    """One device and the process that works on it, one job at a time; used and closed by one thread."""

    @property
    def name(self) -> str:
        """The device's name in messages; empty for the only one."""
        ...

    @property
    def measures(self) -> bool:
        """Whether the whole model can be measured there (it needs the user's files)."""
        ...

    def run(self, job: Job) -> Answer:
        """Do it. Raises OvernightError for what machine or user got wrong, StopRequestedError on a stop."""
        ...

    def fault(self) -> str | None:
        """Why this device can do no further work, asked after a failure; None when it answers."""
        ...

    def close(self) -> None:
        """End the process and all below it. Idempotent."""
        ...

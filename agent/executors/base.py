"""The one seam to whoever works for the loop: jobs go to seats, and what they answer comes back as it is done."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from agent.records import Brief, Proposal
from harness.records import JudgeRequest, Verdict, VerifyReport, VerifyRequest

Request = Brief | JudgeRequest | VerifyRequest
Answer = Proposal | Verdict | VerifyReport


class Kind(StrEnum):
    """What a job is; each seat does some of them."""

    PROPOSE = "propose"
    JUDGE = "judge"
    MEASURE = "measure"


@dataclass(frozen=True)
class Job:
    """One piece of work: judge the candidate of experiment `number`, measure the model with it, or have an idea."""

    number: int
    request: Request
    log: Path  # events of the work are written there

    @property
    def kind(self) -> Kind:
        """What it is, by its request."""
        if isinstance(self.request, Brief):
            return Kind.PROPOSE
        return Kind.MEASURE if isinstance(self.request, VerifyRequest) else Kind.JUDGE


@dataclass(frozen=True)
class Done:
    """A job's end: an answer, or the failure that is no verdict on the candidate."""

    job: Job
    seat: str
    answer: Answer | None
    error: Exception | None
    seconds: float


class Seat(Protocol):
    """One device and the process that works on it (or one thinking proposer), a job at a time, in one thread."""

    @property
    def name(self) -> str:
        """The device's name in messages; empty for the only one."""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """The jobs it can do: measuring the model needs the user's files."""
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

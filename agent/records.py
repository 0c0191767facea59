"""The agent's own nouns: candidates, briefs, attempts, experiments. No torch, no litellm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.records import BACKENDS, LibraryPolicy, Target, Verdict


class ExperimentState(StrEnum):
    """How far one experiment has come; one journal transaction moves it one step."""

    PROPOSED = "proposed"
    JUDGED = "judged"
    DECIDED = "decided"
    RECORDED = "recorded"


class RowStatus(StrEnum):
    """The `status` column of results.tsv (design §9)."""

    KEEP = "keep"
    DISCARD = "discard"
    INCORRECT = "incorrect"
    CRASH = "crash"
    TIMEOUT = "timeout"
    CHEAT = "cheat"
    INVALID_REPLY = "invalid_reply"
    DUPLICATE = "duplicate"
    ENVIRONMENT = "environment"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Usage:
    """What a proposal cost. `cost_usd` is None when nobody knows the price."""

    tokens: int = 0
    cost_usd: float | None = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    finish: str = ""  # the finish reason of the last reply
    seconds: float = 0.0
    notes: tuple[str, ...] = ()  # what the morning should know: a truncating server, an unknown price


@dataclass(frozen=True)
class Candidate:
    """One whole kernel file for one target, and where it came from."""

    target: str  # target id
    backend: str
    source: str
    description: str
    proposer: str
    tactic: str = ""
    hypothesis: str = ""
    prompt: str = ""
    reply: str = ""
    usage: Usage = field(default_factory=Usage)
    parents: tuple[int, ...] = ()  # the experiments that it was made from; none: a kernel of its own

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; one of {', '.join(BACKENDS)}")


@dataclass(frozen=True)
class InvalidReply:
    """A proposer's answer that is no candidate: costs an experiment number, no judge time; `reason` is fed back."""

    target: str
    proposer: str
    reason: str
    prompt: str = ""
    reply: str = ""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class NothingLeft:
    """The proposer has no more ideas for this target; it is parked until its share or its incumbent changes."""

    target: str
    reason: str


@dataclass(frozen=True)
class Command:
    """A program that proposes: prompt on standard input, one kernel file on standard output."""

    argv: tuple[str, ...] = ()
    timeout_s: float = 600.0


@dataclass(frozen=True)
class LanguageModel:
    """One model that proposes; its key is in the environment variable `api_key_env`, never here."""

    model: str
    api_base: str | None = None
    weight: float = 1.0
    api_key_env: str | None = None


@dataclass(frozen=True)
class Llm:
    """The settings of the `llm` proposer."""

    models: tuple[LanguageModel, ...] = ()
    max_tokens: int = 16384
    first_token_timeout_s: float = 120.0
    stall_timeout_s: float = 60.0
    call_timeout_s: float = 600.0


Proposal = Candidate | InvalidReply | NothingLeft


@dataclass(frozen=True)
class Attempt:
    """One finished experiment on a target, as a proposer sees it."""

    number: int
    candidate_sha256: str
    source: str
    backend: str
    tactic: str
    description: str
    status: RowStatus
    verdict: Verdict | None
    parents: tuple[int, ...] = ()
    proposer: str = ""
    hypothesis: str = ""


REST = 40  # judged attempts without a better kernel, after which a target gives way to others


class Move(StrEnum):
    """What the proposer is asked for."""

    START = "start"  # a kernel of its own, the first of a line
    EDIT = "edit"  # one change to `base`
    MERGE = "merge"  # the best of `base` and `partner` in one kernel


@dataclass(frozen=True)
class Plan:
    """The next move on a target; `stalled` counts the judged attempts since the last better kernel."""

    move: Move
    base: Attempt | None = None
    partner: Attempt | None = None
    stalled: int = 0

    @property
    def parents(self) -> tuple[int, ...]:
        """The experiments that a candidate of this plan is made from."""
        return tuple(one.number for one in (self.base, self.partner) if one)

    @property
    def resting(self) -> bool:
        """Whether the ladder has ended: other targets come first until the shares move."""
        return self.stalled >= REST


@dataclass(frozen=True)
class Outcome:
    """How one experiment of the session ended, on whatever target: what a later proposal may learn from."""

    number: int
    target: str
    kind: str
    tactic: str
    hypothesis: str
    model: str
    status: RowStatus
    speedup: float | None  # against what it had to beat
    cost_usd: float | None
    detail: str = ""


@dataclass(frozen=True)
class Allowance:
    """What is left of the budget for language models; None is no limit."""

    calls: int | None = None
    dollars: float | None = None


@dataclass(frozen=True)
class Brief:
    """All a proposer gets to know: the target, the incumbent and what was tried on it. Never seeds or tolerances."""

    target: Target
    device: str  # "cpu" or "cuda"
    device_name: str
    peaks: Mapping[str, float]
    incumbent_source: str | None  # None: PyTorch itself is what must be beaten
    incumbent_backend: str | None
    attempts: tuple[Attempt, ...]
    program: str  # program.md as it reads now
    in_flight: tuple[Candidate, ...] = ()  # being judged now: not to be proposed again, nothing known of them yet
    plan: Plan = field(default_factory=lambda: Plan(Move.START))
    archive: tuple[Attempt, ...] = ()  # the best correct kernel of each structure, the fastest first
    number: int = 0  # of the experiment that the proposal becomes
    history: tuple[Outcome, ...] = ()  # the session's experiments, on all targets
    allowance: Allowance = field(default_factory=Allowance)
    library_calls: LibraryPolicy = LibraryPolicy.ALLOW
    compiled: tuple[str, ...] = ()  # what the compiler said of the incumbent's kernels, one sentence each

    def played(self) -> set[str]:
        """Tactics that were tried or are being tried; one that was cut off is judged again by itself."""
        tried = {attempt.tactic for attempt in self.attempts if attempt.status is not RowStatus.INTERRUPTED}
        return tried | {candidate.tactic for candidate in self.in_flight}


@dataclass(frozen=True)
class Experiment:
    """One numbered experiment of a session, as the journal holds it."""

    number: int
    target: str
    state: ExperimentState
    candidate: Candidate | None
    status: RowStatus | None
    verdict: Verdict | None
    commit: str | None
    started_at: str
    finished_at: str | None
    detail: str = ""
    model_ms: float | None = None
    model_speedup: float | None = None
    model_gain: float | None = None  # of a keep: the model without it over the model with it, measured side by side

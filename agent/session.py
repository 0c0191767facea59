"""One session: its files, branch, journal, lock and settings, opened together."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from agent import results
from agent.budget import Budget, Spent, exhausted
from agent.devices import ANYWHERE, Device, counted, devices_of
from agent.errors import InputError
from agent.journal import Journal
from agent.lock import SessionLock
from agent.machine_watch import Watch
from agent.places import SessionPlaces, write_whole
from agent.policy import DEVICE_LOST, duplicate_of
from agent.proposers.base import Proposer
from agent.proposers.prompt import learned
from agent.records import (
    Allowance,
    Attempt,
    Brief,
    Candidate,
    Command,
    Experiment,
    ExperimentState,
    InvalidReply,
    Llm,
    Outcome,
    RowStatus,
    Usage,
)
from agent.repository import SessionBranch
from agent.search.archive import archive
from agent.search.lines import plan
from agent.steering import steering
from agent.verbs import Harness
from harness import wire
from harness.records import LibraryPolicy, ModelSpec, ProfileReport, Target, Verdict, VerifyReport
from harness.rpc import EventSink

Say = Callable[[str], None]
STOPPED_ON_REQUEST = "stopped on request"
RAY = "ray"
NOT_COUNTED = {RowStatus.INTERRUPTED, RowStatus.ENVIRONMENT}


@dataclass(frozen=True)
class Show:
    """How a session speaks: a line, what is going on, the ranking after a profile, the model at the end."""

    say: Say
    event: EventSink
    ranking: Callable[[ProfileReport], None]
    verification: Callable[[VerifyReport], None]


@dataclass(frozen=True)
class Options:
    """What a session was started with; kept in its journal, so that `resume` needs no flags."""

    model: ModelSpec
    device: str  # "cpu" or "cuda"
    proposer: str = "playbook"
    library_calls: LibraryPolicy = LibraryPolicy.ALLOW
    budget: Budget = field(default_factory=Budget)
    command: Command = field(default_factory=Command)
    llm: Llm = field(default_factory=Llm)
    executor: str = "local"
    devices: tuple[str, ...] = ()

    def places(self) -> tuple[Device, ...]:
        """The devices that are named, on this host or counted on a cluster; raises InputError."""
        return (counted if self.executor == RAY else devices_of)(self.devices, self.device)

    config: str = ""  # the file of --config; empty: the workspace's overnight.yaml
    flags: tuple[str, ...] = ()  # settings that a flag has set: they win over the file's, edited ones included


@dataclass
class Session:
    """An opened session; the loop's only argument."""

    places: SessionPlaces
    options: Options
    journal: Journal
    branch: SessionBranch
    lock: SessionLock
    harness: Harness
    proposer: Proposer
    show: Show
    make_proposer: Callable[[Options], Proposer]
    devices: tuple[Device, ...] = (ANYWHERE,)
    report: ProfileReport | None = None
    verified: VerifyReport | None = None  # the model with what is kept, as measured last by this process
    parked: set[str] = field(default_factory=set)
    reached: str = ""  # the limit that a proposer came to before the budget as counted did
    program: str = ""  # program.md as last read
    idle: dict[str, int] = field(default_factory=dict)  # targets without ideas, and the keeps there were then
    watch: Watch = field(default_factory=Watch)
    pending: dict[int, Verdict] = field(default_factory=dict)  # crashes that wait for the original to be judged
    _known: dict[int, Attempt] = field(default_factory=dict)
    on_keep: Callable[[Experiment], None] = lambda _experiment: None  # after each keep is recorded
    on_end: Callable[[str, str], None] = lambda _ending, _reason: None  # when a run ends by itself or on request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.close()
        self.branch.close()
        self.journal.close()
        self.lock.release()

    def say(self, line: str) -> None:
        """One line of progress."""
        self.show.say(line)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The profiled targets, in ranking order."""
        assert self.report is not None
        return self.report.targets

    def target(self, target_id: str) -> Target:
        """One target; raises KeyError for one that the profile does not have."""
        return {target.id: target for target in self.targets}[target_id]

    def experiments(self) -> tuple[Experiment, ...]:
        """Those that still say something about the targets as they are now."""
        return still_valid(self.journal)

    def stop_reason(self, thinking: int = 0) -> str | None:
        """Why no further experiment may start, while `thinking` more are being thought of."""
        if self.harness.stop() or steering(self.places).stopping:
            return STOPPED_ON_REQUEST
        if self.reached:
            return self.reached
        spent = self.spent()
        return exhausted(self.options.budget, replace(spent, experiments=spent.experiments + thinking))

    def closed(self) -> frozenset[str]:
        """Targets not to be worked on: parked, or steered away from."""
        ids = tuple(target.id for target in self.targets if target.id not in self.parked)
        keeps = self.keeps()
        without_ideas = {target for target, then in self.idle.items() if then == keeps}
        return frozenset(self.parked) | without_ideas | steering(self.places).closed(ids)

    def keeps(self) -> int:
        """How many keeps there were: each changes incumbents and shares."""
        return len([one for one in self.experiments() if one.status is RowStatus.KEEP])

    def change_options(self, options: Options) -> None:
        """Go on with other settings; raises InputError, and changes nothing, when no proposer can be made of them."""
        proposer = self.make_proposer(options)
        self.journal.set_note("options", wire.to_json(options))
        self.options, self.proposer = options, proposer

    def spent(self) -> Spent:
        """What counts against the budget."""
        usage = self.journal.usage()
        counted = [one for one in self.journal.experiments() if one.status not in NOT_COUNTED]
        return Spent(self.journal.active_s(), len(counted), usage.tokens, usage.calls, usage.cost_usd)

    def incumbent(self, target_id: str) -> Candidate | None:
        """The kernel that stands on the branch for a target."""
        kept = [one for one in self.experiments() if one.target == target_id and one.status is RowStatus.KEEP]
        return kept[-1].candidate if kept else None

    def owed(self) -> list[Experiment]:
        """Those that were cut off and not judged since: their candidates come before anything new is proposed."""
        known = {target.id for target in self.targets}
        recent = [one for one in self.experiments() if one.target in known and one.candidate]
        return [
            one
            for place, one in enumerate(recent)
            if _cut_off(one, recent) and not any(_said(later) == _said(one) for later in recent[place + 1 :])
        ]

    def brief(self, target: Target) -> Brief:
        """What the proposer gets to know now; program.md is read anew each time, so that a user can steer."""
        assert self.report is not None
        incumbent = self.incumbent(target.id)
        attempts, in_flight = self.attempts(target.id), self.in_flight(target.id)
        return Brief(
            target=target,
            device=self.options.device,
            device_name=self.report.device_name,
            peaks=self.report.peaks,
            incumbent_source=incumbent.source if incumbent else None,
            incumbent_backend=incumbent.backend if incumbent else None,
            attempts=attempts,
            program=self.guidance(),
            in_flight=in_flight,
            plan=plan(attempts, len(in_flight)),
            archive=archive(attempts),
            number=len(self.journal.experiments()) + 1,
            history=self.history(),
            allowance=self.allowance(),
            library_calls=self.options.library_calls,
            compiled=self.compiled(target.id),
        )

    def attempts(self, target_id: str) -> tuple[Attempt, ...]:
        """What was tried on a target and is decided."""
        mine = [one for one in self.experiments() if one.target == target_id and one.status is not None]
        return tuple(self._attempt(one) for one in mine)

    def in_flight(self, target_id: str) -> tuple[Candidate, ...]:
        """What is being judged, or waits to prove itself, on a target."""
        mine = [one for one in self.experiments() if one.target == target_id and one.status is None]
        return tuple(one.candidate for one in mine if one.candidate)

    def _attempt(self, one: Experiment) -> Attempt:
        if one.state is not ExperimentState.RECORDED:
            return attempt(one, self.journal)
        if one.number not in self._known:  # a recorded experiment never changes
            self._known[one.number] = attempt(one, self.journal)
        return self._known[one.number]

    def guidance(self) -> str:
        """program.md as it reads now; one that cannot be read is said, and what was read before stays."""
        path = self.places.root / "program.md"
        try:
            self.program = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.program = ""
        except OSError as error:
            self.say(f"program.md cannot be read ({error.strerror}): what was read before stays in force")
        return self.program

    def compiled(self, target_id: str) -> tuple[str, ...]:
        """What the compiler said of the kept kernel, from the log of its judgement."""
        kept = [one for one in self.experiments() if one.target == target_id and one.status is RowStatus.KEEP]
        return compiler_notes(self.places.experiment(kept[-1].number) / "log.txt") if kept else ()

    def history(self) -> tuple[Outcome, ...]:
        """How every decided experiment of the session ended."""
        kinds = {target.id: target.kind for target in self.targets}
        return tuple(
            outcome(one, kinds.get(one.target, one.target), self.journal)
            for one in self.experiments()
            if one.status is not None
        )

    def allowance(self) -> Allowance:
        """What is left for language models."""
        budget, spent = self.options.budget, self.spent()
        calls = None if budget.calls is None else budget.calls - spent.calls
        known = budget.dollars is not None and spent.dollars is not None
        return Allowance(calls, (budget.dollars or 0.0) - (spent.dollars or 0.0) if known else None)

    def caution(self, line: str) -> None:
        """Say what the morning should know too, once a session."""
        name = f"caution:{line}"
        if self.journal.note(name) is None:
            self.journal.set_note(name, line)
            self.say(line)

    def store_source(self, number: int, proposal: Candidate | InvalidReply) -> Path:
        """Write prompt, reply and candidate of an experiment; returns the candidate's file."""
        folder = self.places.experiment(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompt.md").write_text(proposal.prompt, encoding="utf-8")
        (folder / "reply.md").write_text(proposal.reply, encoding="utf-8")
        if proposal.usage.calls:
            write_whole(folder / "usage.json", wire.to_json(proposal.usage) + "\n")
        if isinstance(proposal, Candidate):
            (folder / "candidate.py").write_bytes(proposal.source.encode())
        return folder / "candidate.py"

    def store_verdict(self, experiment: Experiment | None) -> str:
        """Write an experiment's verdict.json from the journal; returns its sha256."""
        assert experiment is not None
        assert experiment.verdict is not None
        text = wire.to_json(experiment.verdict) + "\n"
        write_whole(self.places.experiment(experiment.number) / "verdict.json", text)
        return hashlib.sha256(text.encode()).hexdigest()

    def record(self, number: int) -> Experiment:
        """Write the row of a decided experiment, once, and close it; returns it."""
        experiment = self.journal.experiment(number)
        assert experiment is not None
        results.append(self.places.results, row(experiment, self.places.name, self.journal, self.report))
        self.journal.recorded(number)
        if self.options.proposer == "llm":
            write_whole(self.places.folder / "learned.md", learned(self.history()))
        if experiment.status is RowStatus.KEEP:
            self.on_keep(experiment)
        return experiment


def _said(one: Experiment) -> Candidate | None:
    """The candidate whatever it cost: one judged again is not bought again."""
    return replace(one.candidate, usage=Usage()) if one.candidate else None


def _cut_off(one: Experiment, all_of_them: list[Experiment]) -> bool:
    """Whether it got no verdict by no fault of its own; one that a device was lost with is given one more chance."""
    if one.status is RowStatus.ENVIRONMENT and one.detail.startswith(DEVICE_LOST):
        return sum(_said(other) == _said(one) for other in all_of_them) == 1
    return one.status is RowStatus.INTERRUPTED


def still_valid(journal: Journal) -> tuple[Experiment, ...]:
    """All experiments but those on a target that became another one when the model changed."""
    forgotten = journal.forgotten()
    return tuple(one for one in journal.experiments() if one.number > forgotten.get(one.target, 0))


def forget_changed_targets(journal: Journal, before: ProfileReport, after: ProfileReport) -> list[str]:
    """After a change, an id may name another region: what was learnt on the old one no longer counts; returns them."""
    keys = {target.id: target.key for target in after.targets}
    changed = [target.id for target in before.targets if keys.get(target.id) != target.key]
    last = len(journal.experiments())
    for target_id in changed:
        journal.set_note(f"forgotten:{target_id}", str(last))
    return changed


def row(experiment: Experiment, name: str, journal: Journal, report: ProfileReport | None) -> results.Row:
    """The row of an experiment, from the journal and the profile."""
    kinds = {target.id: target.kind for target in report.targets} if report else {}
    earlier = [one for one in journal.experiments() if one.number < experiment.number]
    original = duplicate_of(experiment.candidate, earlier) if experiment.status is RowStatus.DUPLICATE else None
    return results.row_of(
        experiment,
        session=name,
        kernel_type=kinds.get(experiment.target, experiment.target),
        device=report.device if report else "",
        invalid=journal.invalid_reply(experiment.number),
        original=original.status if original else None,
    )


def attempt(experiment: Experiment, journal: Journal) -> Attempt:
    """An experiment as a proposer sees it; an invalid reply has no source and its reason as description."""
    assert experiment.status is not None
    candidate, invalid = experiment.candidate, journal.invalid_reply(experiment.number)
    source = candidate.source if candidate else ""
    return Attempt(
        number=experiment.number,
        candidate_sha256=hashlib.sha256(source.encode()).hexdigest(),
        source=source,
        backend=candidate.backend if candidate else "",
        tactic=candidate.tactic if candidate else "",
        description=candidate.description if candidate else invalid.reason if invalid else "",
        status=experiment.status,
        verdict=experiment.verdict,
        parents=candidate.parents if candidate else (),
        hypothesis=candidate.hypothesis if candidate else "",
        proposer=candidate.proposer if candidate else invalid.proposer if invalid else "",
    )


def outcome(experiment: Experiment, kind: str, journal: Journal) -> Outcome:
    """An experiment as something to learn from."""
    assert experiment.status is not None
    candidate, verdict = experiment.candidate, experiment.verdict
    invalid = None if candidate else journal.invalid_reply(experiment.number)
    source = candidate or invalid
    judged = verdict.detail if verdict and not verdict.accepted else experiment.detail
    return Outcome(
        number=experiment.number,
        target=experiment.target,
        kind=kind,
        tactic=candidate.tactic if candidate else "",
        hypothesis=candidate.hypothesis if candidate else "",
        model=source.usage.model if source else "",
        status=experiment.status,
        speedup=verdict.timing.speedup_vs_best if verdict and verdict.timing else None,
        cost_usd=source.usage.cost_usd if source else None,
        detail=invalid.reason if invalid else judged,
    )


def compiler_notes(log: Path) -> tuple[str, ...]:
    """The last `compiled` event of a judgement's log, one sentence for each kernel."""
    try:
        events = [line.split(" ", 2) for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        said = [event[2] for event in events if len(event) == 3 and event[1] == "compiled"]
        return tuple(str(line) for line in json.loads(said[-1])["kernels"]) if said else ()
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ()  # never judged here, or a line that a kill cut short


def read_options(journal: Journal) -> Options:
    """The stored settings."""
    text = journal.note("options")
    if text is None:
        raise InputError(f"{journal.path} holds no session settings: delete its folder and start a new session.")
    return wire.from_json(Options, text)


def note_tip(session: Session) -> None:
    """Remember where the branch stands, so that a moved one is noticed."""
    tip = session.branch.tip()
    if tip and tip != session.journal.note("tip"):
        session.journal.set_note("tip", tip)

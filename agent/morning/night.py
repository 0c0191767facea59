"""A session at one moment, read from its files without writing to them: what every page and picture is made of."""

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

from agent.errors import MachineError
from agent.journal import Journal, now_iso
from agent.lock import running
from agent.places import SessionPlaces
from agent.records import Experiment, InvalidReply, RowStatus, Usage
from agent.report import SessionStatus, status_from
from agent.steering import steering
from agent.timeline import Said, said
from harness import wire
from harness.records import ProfileReport, Target, Timing, VerifyReport


@dataclass(frozen=True)
class Trial:
    """One experiment, and the experiment whose kernel it had to beat (None: PyTorch itself)."""

    experiment: Experiment
    invalid: InvalidReply | None
    rival: int | None

    @property
    def made_from(self) -> tuple[int, ...]:
        """The experiments that its proposer started from, as far as it says so."""
        return self.experiment.candidate.parents if self.experiment.candidate else ()

    @property
    def parent(self) -> int | None:
        """What it grew out of: the kernel that it was made from, else the one that it had to beat."""
        return self.made_from[0] if self.made_from else self.rival

    @property
    def number(self) -> int:
        """Its number in the session."""
        return self.experiment.number

    @property
    def target(self) -> str:
        """The target's id."""
        return self.experiment.target

    @property
    def status(self) -> str:
        """How it ended, or how far it is."""
        return str(self.experiment.status or self.experiment.state)

    @property
    def kept(self) -> bool:
        """Whether its kernel was committed and stays."""
        return self.experiment.status is RowStatus.KEEP

    @property
    def timing(self) -> Timing | None:
        """Its benchmark."""
        return self.experiment.verdict.timing if self.experiment.verdict else None

    @property
    def source(self) -> str:
        """The kernel file; empty where a reply held none."""
        return self.experiment.candidate.source if self.experiment.candidate else ""

    @property
    def description(self) -> str:
        """What its proposer says it is."""
        written = self.experiment.candidate or self.invalid
        return getattr(written, "description", "") or ("a reply that is no kernel" if self.invalid else "")

    @property
    def proposer(self) -> str:
        """Who proposed it."""
        written = self.experiment.candidate or self.invalid
        return written.proposer if written else ""

    @property
    def prompt(self) -> str:
        """What the proposer was asked."""
        written = self.experiment.candidate or self.invalid
        return written.prompt if written else ""

    @property
    def reply(self) -> str:
        """What it answered."""
        written = self.experiment.candidate or self.invalid
        return written.reply if written else ""

    @property
    def usage(self) -> Usage:
        """What it cost."""
        written = self.experiment.candidate or self.invalid
        return written.usage if written else Usage()

    @property
    def reason(self) -> str:
        """Why it ended so, in the judge's or the session's words."""
        if self.experiment.detail:
            return self.experiment.detail
        return self.experiment.verdict.detail if self.experiment.verdict else ""


@dataclass(frozen=True)
class Night:
    """All that is known of a session now."""

    status: SessionStatus
    model: str  # as the user named it, without the workspace's path
    profile: ProfileReport | None
    verified: VerifyReport | None
    verified_is_old: bool  # something was kept since the model was verified
    trials: tuple[Trial, ...]
    unjudgeable: tuple[tuple[str, str], ...]
    forgotten: tuple[tuple[str, int], ...]  # the model changed: experiments up to that number no longer count
    runs: tuple[tuple[str, float], ...]  # start (UTC, ISO), active seconds
    judge_s: float
    events: tuple[tuple[str, str], ...]  # when (UTC, ISO) and what the watch over the machine saw
    said: tuple[Said, ...]  # the session's own words, experiments left out
    paused: bool
    read_at: str

    @property
    def state(self) -> str:
        """Whether it runs, in words."""
        return "paused" if self.paused else "running" if self.status.pid else "not running"

    @property
    def name(self) -> str:
        """The session's name."""
        return self.status.name

    @property
    def targets(self) -> tuple[Target, ...]:
        """The profiled targets."""
        return self.profile.targets if self.profile else ()

    @property
    def kept(self) -> tuple[Trial, ...]:
        """The experiments whose kernels stand."""
        return tuple(one for one in self.trials if one.kept)

    def trial(self, number: int) -> Trial | None:
        """One of them."""
        return self._by_number.get(number)

    @cached_property
    def _by_number(self) -> dict[int, Trial]:
        return {one.number: one for one in self.trials}

    def of_target(self, target: str) -> tuple[Trial, ...]:
        """The experiments on one target that still say something about it."""
        return tuple(one for one in self.trials if one.target == target and self.counts(one))

    def counts(self, trial: Trial) -> bool:
        """Whether it still says something about its target: the model may have changed since."""
        return trial.number > dict(self.forgotten).get(trial.target, 0)

    def lineage(self, trial: Trial) -> tuple[Trial, ...]:
        """The kernels that it grew out of, the first one first."""
        chain: list[Trial] = []
        parent = trial.parent
        while parent is not None and (found := self.trial(parent)) and found not in chain:
            chain.insert(0, found)
            parent = found.parent
        return tuple(chain)


def read_night(places: SessionPlaces, *, known: Sequence[Experiment] = (), with_talk: bool = True) -> Night:
    """Read a session, also while it runs. Prompts and replies are left out unless `with_talk`."""
    holder = running(places.lock)
    with closing(Journal(places.journal, read_only=True, known=known)) as journal, journal.frozen():
        experiments = journal.experiments()
        forgotten = journal.forgotten()
        verified, is_old = _verified(places, experiments)
        return Night(
            status=(status := status_from(places.name, journal, holder)),
            model=status.model.removeprefix(f"{places.root}/"),
            profile=_profile(places),
            verified=verified,
            verified_is_old=is_old,
            trials=_trials(journal, experiments, forgotten, with_talk=with_talk),
            unjudgeable=tuple(journal.unjudgeable().items()),
            forgotten=tuple(forgotten.items()),
            runs=journal.runs(),
            judge_s=journal.judge_s(),
            events=journal.events(),
            said=said(places.timeline),
            paused=holder is not None and steering(places).paused,
            read_at=now_iso(),
        )


def _trials(
    journal: Journal, experiments: Sequence[Experiment], forgotten: dict[str, int], *, with_talk: bool
) -> tuple[Trial, ...]:
    rivals = _rivals(experiments, forgotten, journal.winners_against())
    return tuple(
        Trial(
            experiment=one if with_talk else silent(one),
            invalid=journal.invalid_reply(one.number) if one.candidate is None else None,
            rival=rivals[one.number],
        )
        for one in experiments
    )


def _rivals(
    experiments: Sequence[Experiment], forgotten: dict[str, int], against: dict[int, str]
) -> dict[int, int | None]:
    """Whose kernel each one had to beat: as the journal noted it, else the last one kept before it."""
    kept = {_mark(one): one.number for one in experiments if one.status is RowStatus.KEEP}
    standing: dict[str, int] = {}
    rivals: dict[int, int | None] = {}
    for one in experiments:
        last = standing.get(one.target)
        lost = last is not None and last <= forgotten.get(one.target, 0) < one.number
        noted = against.get(one.number)
        rivals[one.number] = kept.get((one.target, noted)) if noted else None if lost else last
        if one.status is RowStatus.KEEP:
            standing[one.target] = one.number
    return rivals


def _mark(one: Experiment) -> tuple[str, str]:
    source = one.candidate.source if one.candidate else ""
    return one.target, hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()


def silent(one: Experiment) -> Experiment:
    """The experiment without its prompt and reply, which are most of its size."""
    candidate = one.candidate
    if candidate is None or not (candidate.prompt or candidate.reply):
        return one
    return replace(one, candidate=replace(candidate, prompt="", reply=""))


def _profile(places: SessionPlaces) -> ProfileReport | None:
    try:
        return places.read_profile()
    except ValueError as error:
        raise MachineError(
            f"{places.profile} is damaged or of another version: delete it, and `overnight resume {places.name}`"
            " profiles the model again."
        ) from error


def _verified(places: SessionPlaces, experiments: Sequence[Experiment]) -> tuple[VerifyReport | None, bool]:
    """The last verification, and whether something was kept after it."""
    path = places.verified
    try:
        report, written = wire.from_json(VerifyReport, path.read_bytes()), path.stat().st_mtime
    except FileNotFoundError:
        return None, False
    except ValueError as error:
        raise MachineError(f"{path} is damaged: make it anew with `overnight verify {places.name}`.") from error
    kept = [one.finished_at for one in experiments if one.status is RowStatus.KEEP and one.finished_at]
    return report, any(seconds(finished) > written + 1.0 for finished in kept)


def seconds(moment: str) -> float:
    """An ISO time of the journal as seconds since the epoch."""
    from datetime import datetime

    return datetime.fromisoformat(moment).timestamp()

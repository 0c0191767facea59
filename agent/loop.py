"""The night: propose, judge, keep or revert, record, and measure the model after each keep."""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from agent import policy, ranking
from agent.errors import InputError, MachineError, OursError, OvernightError, StopRequestedError
from agent.harness_client import HarnessDiedError, HarnessProcess
from agent.journal import Decision, now_iso
from agent.places import write_whole
from agent.proposers.base import Ordered
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, NothingLeft, RowStatus
from agent.repository import KeepMessage
from agent.session import Session, forget_changed_targets, kept_kernels, note_tip, open_branch_of, verify_request
from agent.verbs import JUDGE_TIMEOUT_S
from harness import wire
from harness.records import JudgeRequest, Target, Verdict, VerifyReport

QUICK_MODES = {"cpu": ("overnight", "eager", "compile"), "cuda": ("overnight", "eager", "compile", "reduce_overhead")}
ENVIRONMENT_STREAK = 3
UNRELIABLE_STREAK = 6  # a busy machine may calm down: it gets more chances, and time
TARGET_ENVIRONMENT_STREAK = 2
UNRELIABLE_WAIT_S = 10.0
UNJUDGEABLE = "unjudgeable"


class Ending(StrEnum):
    """How a run ended."""

    BUDGET = "budget reached"
    STOPPED = "stopped"
    EXHAUSTED = "nothing left to try"
    NOTHING = "nothing to optimise"


@dataclass(frozen=True)
class Outcome:
    """A run's end and its one-sentence reason."""

    ending: Ending
    reason: str


def night(session: Session) -> Outcome:
    """The whole night. Raises MachineError (resumable) when the environment fails, InputError for the user's part."""
    judge, prepared = Judge(session), False
    try:
        prepare(session)
        prepared = True
        while (reason := session.stop_reason()) is None:
            proposal = next_proposal(session)
            if proposal is None:
                return _exhausted(session)
            number = open_experiment(session, proposal)
            if isinstance(proposal, Candidate) and not settle_unjudged(session, number, proposal):
                examine(session, judge, number, proposal)
            finish(session, number)
            park_unwell(session, proposal.target)
        return Outcome(Ending.STOPPED if session.harness.stop() else Ending.BUDGET, reason)
    except StopRequestedError:
        if prepared:
            interrupt(session)
        return Outcome(Ending.STOPPED, "stopped on request")
    finally:
        judge.close()


# Before the first experiment


def prepare(session: Session) -> None:
    """Profile once, make the branch ready, and settle what a kill left half done."""
    session.journal.start_run()
    session.parked.update(session.journal.unjudgeable())
    if session.report is None:
        session.say(f"profiling {session.options.model.reference}")
        session.report = session.harness.profile(session.options.model, session.places.folder)
        before = session.places.read_profile_before()
        if before:
            forget_changed_targets(session.journal, before, session.report)
        write_whole(session.places.profile, wire.to_json(session.report))
        session.show.ranking(session.report)
    open_branch_of(session)
    reconcile(session)


def reconcile(session: Session) -> None:
    """Close every experiment that a kill left open: cut off ones are marked, judged ones decided, not judged again."""
    for one in session.journal.experiments():
        if one.state is ExperimentState.RECORDED:
            continue
        if one.state is ExperimentState.PROPOSED and one.candidate:
            session.store_source(one.number, one.candidate)
        finish(session, one.number, cut_off=True)
        outcome = next(after.status for after in session.journal.experiments() if after.number == one.number)
        again = "; the same candidate is judged again next" if outcome is RowStatus.INTERRUPTED else ""
        session.say(f"experiment {one.number} was left {one.state} by the run before: now {outcome}{again}")


def interrupt(session: Session) -> None:
    """Mark the experiment that a clean stop cut off; a judged one keeps its verdict and is decided on resume."""
    for one in session.journal.experiments()[-1:]:
        if one.state is ExperimentState.PROPOSED:
            finish(session, one.number, cut_off=True)


# One experiment


def next_proposal(session: Session) -> Candidate | InvalidReply | None:
    """What to judge next: the candidate that was cut off, else the proposer's idea for the best target."""
    interrupted = session.interrupted()
    if interrupted:
        return interrupted.candidate
    while (target := choose_target(session)) is not None:
        proposal = session.proposer.propose(session.brief(target))
        if not isinstance(proposal, NothingLeft):
            return proposal
        session.parked.add(target.id)
        session.say(f"{target.id} is parked: {proposal.reason}")
    return None


def choose_target(session: Session) -> Target | None:
    """The ranking's choice, or that of a proposer with an order of its own (replay)."""
    experiments = session.experiments()
    if isinstance(session.proposer, Ordered):
        playable = [target for target in session.targets if target.id not in session.parked]
        return session.proposer.next_target(playable, experiments)
    parked, seconds = frozenset(session.parked), session.journal.judge_seconds()
    rested = ranking.next_target(session.targets, experiments, parked | ranking.resting(experiments), seconds)
    return rested or ranking.next_target(session.targets, experiments, parked, seconds)


def open_experiment(session: Session, proposal: Candidate | InvalidReply) -> int:
    """Number it, store it, put it into the worktree."""
    again = session.interrupted() is not None
    number = session.journal.propose(proposal.target, proposal, again=again)
    session.store_source(number, proposal)
    if isinstance(proposal, Candidate):
        session.branch.write(kernel_path(proposal), proposal.source.encode())
    return number


def settle_unjudged(session: Session, number: int, candidate: Candidate) -> bool:
    """A candidate that says what an earlier one said costs no judge time; returns whether this was one."""
    earlier = [one for one in session.experiments() if one.number != number]
    same = policy.duplicate_of(candidate, earlier)
    if same:
        detail = f"the same kernel as experiment {same.number}, which was {same.status}"
        _decide(session, number, candidate, Decision(RowStatus.DUPLICATE, detail))
    return same is not None


def examine(session: Session, judge: "Judge", number: int, candidate: Candidate) -> None:
    """Judge it and store the verdict; what the machine or we got wrong is a row `environment`, not a crash."""
    started = time.monotonic()
    try:
        verdict = judge(number, candidate)
    except InputError:
        raise
    except OvernightError as error:
        judge.close()
        _decide(session, number, candidate, Decision(RowStatus.ENVIRONMENT, " ".join(str(error).split())))
        return
    if verdict.guard == UNJUDGEABLE:
        withdraw(session, number, candidate, verdict.detail)
        return
    session.journal.judged(number, verdict, judge_s=time.monotonic() - started)
    session.store_verdict(session.journal.experiment(number))


def withdraw(session: Session, number: int, candidate: Candidate, reason: str) -> None:
    """A target that cannot be judged has no row: its first candidate is taken back, the reason goes to the report."""
    session.branch.revert(kernel_path(candidate))
    session.journal.withdraw(number, candidate.target, reason)
    shutil.rmtree(session.places.experiment(number), ignore_errors=True)
    session.parked.add(candidate.target)
    session.say(f"{candidate.target} is set aside: {reason}")


def finish(session: Session, number: int, *, cut_off: bool = False) -> None:
    """Take an experiment from where it stands to its row."""
    one = session.journal.experiment(number)
    if one is None:
        return  # withdrawn: its target cannot be judged
    if one.state is not ExperimentState.DECIDED:
        _decide(session, number, one.candidate, decision(session, one, cut_off=cut_off))
    session.say(headline(session.record(number)))


def decision(session: Session, one: Experiment, *, cut_off: bool) -> Decision:
    """Keep, revert or set aside."""
    if one.candidate is None:
        invalid = session.journal.invalid_reply(one.number)
        return Decision(RowStatus.INVALID_REPLY, invalid.reason if invalid else "")
    if one.verdict is None:
        assert cut_off
        return Decision(RowStatus.INTERRUPTED, "cut off before its verdict; judged again under the next number")
    status = policy.row_status(one.verdict)
    return keep(session, one, one.candidate, one.verdict) if status is RowStatus.KEEP else Decision(status)


def keep(session: Session, one: Experiment, candidate: Candidate, verdict: Verdict) -> Decision:
    """Commit a winner, measure the model, and take it out again when the model is not better off."""
    fate = session.branch.fate(one.number)
    if fate and fate.taken_out:
        return Decision(RowStatus.DISCARD, fate.taken_out)
    commit = fate.commit if fate else _commit(session, one, candidate, verdict)
    report, reason = measure_model(session, one)
    if reason:
        detail = f"{policy.ISOLATED_ONLY}: {reason}"
        session.branch.take_out(kernel_path(candidate), commit, detail)
        return Decision(RowStatus.DISCARD, detail)
    session.verified = report
    speedup = report.model_speedup if report else None
    return Decision(RowStatus.KEEP, "", commit, policy.model_ms(report) if report else None, speedup)


def _commit(session: Session, one: Experiment, candidate: Candidate, verdict: Verdict) -> str:
    assert verdict.timing is not None
    message = KeepMessage(
        experiment=one.number,
        target=candidate.target,
        speedup=verdict.timing.speedup_vs_best,
        description=candidate.description,
        verdict_sha256=session.store_verdict(one),
    )
    judged = session.store_source(one.number, candidate)
    return session.branch.keep(kernel_path(candidate), judged, message)


def _decide(session: Session, number: int, candidate: Candidate | None, what: Decision) -> None:
    """Restore the worktree unless kept, then make the decision durable."""
    if candidate and what.status is not RowStatus.KEEP:
        session.branch.revert(kernel_path(candidate))
    note_tip(session)
    session.journal.decided(number, what)


# Measuring


class Judge:
    """The session's judge process: started with the first candidate, started once again when it dies."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process: HarnessProcess | None = None

    def __call__(self, number: int, candidate: Candidate) -> Verdict:
        """The verdict; events go to the experiment's log. Raises StopRequestedError, MachineError, OursError."""
        session = self._session
        incumbent = session.incumbent(candidate.target)
        tried = [one for one in session.experiments() if one.target == candidate.target and one.verdict]
        request = JudgeRequest(
            target=str(session.places.target_file(candidate.target)),
            source=candidate.source,
            incumbent=incumbent.source if incumbent else None,
            device=session.options.device,
            library_calls=session.options.library_calls,
            trials=len(tried),
        )
        log = session.places.experiment(number) / "log.txt"
        try:
            return self._call(request, log)
        except HarnessDiedError as error:
            session.say(f"the judge is started again: {str(error).splitlines()[0]}")
            self.close()
            return self._call(request, log)

    def _call(self, request: JudgeRequest, log: Path) -> Verdict:
        self._process = self._process or self._session.harness.start("judge")
        with log.open("a", buffering=1, encoding="utf-8") as file:

            def write(name: str, body: Mapping[str, Any]) -> None:
                file.write(f"{now_iso()} {name} {json.dumps(dict(body), ensure_ascii=False)}\n")
                self._session.harness.on_event(name, body)

            verdict = self._process.call("judge", request, Verdict, timeout_s=JUDGE_TIMEOUT_S, on_event=write)
        if verdict.kernel_sha256 != hashlib.sha256(request.source.encode()).hexdigest():
            raise OursError("The judge answered for another kernel than the one it was given.")
        return verdict

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process:
            self._process.close()
            self._process = None


def measure_model(session: Session, one: Experiment) -> tuple[VerifyReport | None, str | None]:
    """The model with everything kept and this one; and why it must go again, or None."""
    kernels = kept_kernels(session.targets, [*session.experiments(), replace(one, status=RowStatus.KEEP)])
    if one.target not in kernels:
        return None, "another choice of disjoint kernels saves more"
    session.say(f"measuring the model with {len(kernels)} kept kernel{'s' * (len(kernels) > 1)}")
    try:
        report = verify(session, kernels, QUICK_MODES[session.options.device])
    except OvernightError as error:
        return None, f"the model could not be measured with it: {' '.join(str(error).split())}"
    return report, policy.isolated_only(one.target, session.verified, report)


def verify(session: Session, kernels: dict[str, Candidate], modes: tuple[str, ...]) -> VerifyReport:
    """Measure the whole model in a process of its own."""
    return session.harness.verify(verify_request(session.options.model, session.places, kernels, modes))


def kernel_path(candidate: Candidate) -> str:
    """The one path that an experiment may change."""
    return f"kernels/{candidate.backend}/{candidate.target}.py"


# Words


def headline(one: Experiment) -> str:
    """One line for the terminal."""
    timing = one.verdict.timing if one.verdict else None
    figures = f"{timing.speedup_vs_best:6.3f}x ({timing.ci_low:.3f} to {timing.ci_high:.3f})" if timing else ""
    words = one.detail or (one.candidate.description if one.candidate else "")
    if one.verdict and not one.verdict.accepted:
        words = one.verdict.detail
    return f"{one.number:4d}  {one.status or '':<13} {one.target:<28} {figures:<26} {' '.join(words.split())}"[:200]


def _exhausted(session: Session) -> Outcome:
    experiments = session.journal.experiments()
    if experiments and experiments[-1].status is RowStatus.ENVIRONMENT:
        raise MachineError(f"No target is left that this machine can judge: {_words_of(experiments[-1])}")
    if experiments:
        return Outcome(Ending.EXHAUSTED, "every target is at its bound, parked or out of ideas")
    return Outcome(Ending.NOTHING, "the profile shows no target that any kernel could improve")


def park_unwell(session: Session, target: str) -> None:
    """Environment failures of one target park it; a streak of them over several targets is the machine's: stop.

    A machine too busy to measure on is given time between tries, and more of them.
    """
    experiments = session.journal.experiments()
    streak = ranking.environment_streak(experiments)
    if not streak:
        return
    busy = all(ranking.is_unreliable(one) for one in streak)
    mine = [one for one in experiments if one.target == target][-TARGET_ENVIRONMENT_STREAK:]
    if len(mine) == TARGET_ENVIRONMENT_STREAK and _all_environment(mine) and not busy:
        session.parked.add(target)
        session.say(f"{target} is parked: {_words_of(mine[-1])}")
    several = busy or len({one.target for one in streak}) > 1
    if several and len(streak) >= (UNRELIABLE_STREAK if busy else ENVIRONMENT_STREAK):
        reason = _words_of(streak[-1])
        raise MachineError(f"{len(streak)} experiments in a row failed because of the machine: {reason}.")
    if busy:
        _wait(session, UNRELIABLE_WAIT_S * len(streak))


def _wait(session: Session, seconds: float) -> None:
    session.say(f"the machine is too busy to measure on: waiting {seconds:.0f} s")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not session.harness.stop():
        time.sleep(0.1)


def _all_environment(experiments: Sequence[Experiment]) -> bool:
    return all(one.status is RowStatus.ENVIRONMENT for one in experiments)


def _words_of(one: Experiment) -> str:
    return one.verdict.detail if one.verdict else one.detail

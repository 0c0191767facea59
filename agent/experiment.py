"""One experiment from its candidate to its row: stored, judged, kept or reverted, recorded."""

import shutil
import time

from agent import policy
from agent.errors import InputError, OvernightError
from agent.journal import Decision
from agent.measuring import Judge, measure_model
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, RowStatus
from agent.repository import KeepMessage
from agent.session import Session, note_tip
from harness.records import Verdict

UNJUDGEABLE = "unjudgeable"


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


def kernel_path(candidate: Candidate) -> str:
    """The one path that an experiment may change."""
    return f"kernels/{candidate.backend}/{candidate.target}.py"


def headline(one: Experiment) -> str:
    """One line for the terminal."""
    timing = one.verdict.timing if one.verdict else None
    figures = f"{timing.speedup_vs_best:6.3f}x ({timing.ci_low:.3f} to {timing.ci_high:.3f})" if timing else ""
    words = one.detail or (one.candidate.description if one.candidate else "")
    if one.verdict and not one.verdict.accepted:
        words = one.verdict.detail
    return f"{one.number:4d}  {one.status or '':<13} {one.target:<28} {figures:<26} {' '.join(words.split())}"[:200]

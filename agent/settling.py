"""What follows from an answer of the bench: a row, or for a winner a commit, the model measured, kept or taken out.

Winners prove themselves one at a time, each on top of the one before. One that beat a kernel which was itself beaten
meanwhile (several devices) is judged again against the new one before it may stand.
"""

import hashlib

from agent import policy
from agent.errors import InputError
from agent.executors.base import Done, Kind
from agent.executors.bench import Bench
from agent.experiment import close, finish, kernel_path, withdraw
from agent.gpu import GpuLostError
from agent.journal import Decision
from agent.measuring import judge_job, measure_job, original_job
from agent.proposing import take_idea
from agent.records import Brief, Candidate, Experiment, ExperimentState, InvalidReply, NothingLeft, RowStatus
from agent.repository import KeepMessage
from agent.session import Session
from harness.records import JudgeRequest, Status, Verdict, VerifyReport

UNJUDGEABLE = "unjudgeable"
CRASHED = {Status.CRASH, Status.TIMEOUT}


def settle(session: Session, bench: Bench, done: Done) -> int:
    """Take an answer, an idea, a verdict or the measured model; then let the next winner, if one waits, prove itself.

    Returns the number of the experiment that the answer was about (an idea's is below 0).
    """
    if isinstance(done.job.request, Brief):
        _take_idea(session, bench, done, done.job.request)
    one = session.journal.experiment(done.job.number)
    if one is not None and one.candidate is not None:
        if done.job.kind is Kind.MEASURE:
            _take_model(session, one, one.candidate, done)
        else:
            _take_verdict(session, bench, one, one.candidate, done)
    prove_next(session, bench)
    return done.job.number


def _take_idea(session: Session, bench: Bench, done: Done, brief: Brief) -> None:
    """What a proposer thought of; when it cannot go on, the session stops."""
    if done.error:
        raise done.error
    assert isinstance(done.answer, Candidate | InvalidReply | NothingLeft)
    take_idea(session, bench, done.answer, brief)


def is_winner(one: Experiment) -> bool:
    """Whether it won in isolation and has still to prove itself in the model."""
    return one.state is ExperimentState.JUDGED and one.verdict is not None and one.verdict.status is Status.KEEP


def _take_verdict(session: Session, bench: Bench, one: Experiment, candidate: Candidate, done: Done) -> None:
    """Store the verdict; what the machine or we got wrong is a row `environment`, not a crash."""
    if isinstance(done.error, InputError):
        raise done.error
    if one.number in session.pending:
        _take_retest(session, one, candidate, done)
        return
    if not isinstance(done.answer, Verdict):
        close(session, one.number, candidate, Decision(RowStatus.ENVIRONMENT, " ".join(str(done.error).split())))
        return
    if done.answer.guard == UNJUDGEABLE:
        withdraw(session, one.number, candidate, done.answer.detail)
        return
    if _doubted(session, bench, one, candidate, done.answer):
        return
    against = _beaten(done.job.request) if done.answer.status is Status.KEEP else ""
    _store(session, one.number, done.answer, done.seconds, against)


def _store(session: Session, number: int, verdict: Verdict, seconds: float, against: str = "") -> None:
    session.journal.judged(number, verdict, judge_s=seconds, against=against)
    session.store_verdict(session.journal.experiment(number))
    if verdict.status is not Status.KEEP:
        finish(session, number)


def _doubted(session: Session, bench: Bench, one: Experiment, candidate: Candidate, verdict: Verdict) -> bool:
    """Before a candidate is blamed for a crash: did the device have trouble? Then the original is judged first.

    Raises GpuLostError, with the row written, when the device is gone.
    """
    try:
        reason = session.watch.doubt(crashed=verdict.status in CRASHED)
    except GpuLostError as error:
        close(session, one.number, candidate, Decision(RowStatus.ENVIRONMENT, f"{policy.DEVICE_LOST}: {error}"))
        raise
    if reason is None:
        return False
    session.say(f"experiment {one.number} ended in a {verdict.status}, but {reason}: the original is judged first")
    session.pending[one.number] = verdict
    bench.submit(original_job(session, one))
    return True


def _take_retest(session: Session, one: Experiment, candidate: Candidate, done: Done) -> None:
    """The original passes: the candidate is to blame. It fails too, or nobody can say: the machine is."""
    verdict = session.pending.pop(one.number)
    if isinstance(done.answer, Verdict) and done.answer.accepted:
        _store(session, one.number, verdict, done.seconds)
        return
    words = done.answer.detail if isinstance(done.answer, Verdict) else " ".join(str(done.error).split())
    detail = f"the original fails here too, so the machine is to blame: {words}"
    session.journal.event(detail)
    close(session, one.number, candidate, Decision(RowStatus.ENVIRONMENT, detail))


def prove_next(session: Session, bench: Bench) -> None:
    """Start measuring the model with the first waiting winner, unless one is being measured."""
    winners = [one for one in session.journal.experiments() if is_winner(one)]
    while winners and not bench.measuring:
        one = winners.pop(0)
        assert one.candidate is not None
        if _outdated(session, one):
            session.say(f"experiment {one.number} beat a kernel that was beaten meanwhile: it is judged again")
            session.journal.reopen(one.number)
            bench.submit(judge_job(session, one.number, one.candidate))
        else:
            _prove(session, bench, one, one.candidate)


def _prove(session: Session, bench: Bench, one: Experiment, candidate: Candidate) -> None:
    """Commit a winner and have the model measured with it; the commit is found again after a kill."""
    fate = session.branch.fate(one.number)
    if fate and fate.taken_out:
        close(session, one.number, candidate, Decision(RowStatus.DISCARD, fate.taken_out))
        return
    commit = fate.commit if fate else _commit(session, one, candidate)
    job = measure_job(session, one)
    if job:
        bench.submit(job)
    else:
        _take_out(session, one, candidate, commit, "another choice of disjoint kernels saves more")


def _take_model(session: Session, one: Experiment, candidate: Candidate, done: Done) -> None:
    """Keep a winner, or take it out again when the model is not better off with it."""
    fate = session.branch.fate(one.number)
    assert fate is not None
    report = done.answer
    if not isinstance(report, VerifyReport):
        words = " ".join(str(done.error).split())
        _take_out(session, one, candidate, fate.commit, f"the model could not be measured with it: {words}")
    elif reason := policy.isolated_only(one.target, report):
        _take_out(session, one, candidate, fate.commit, reason)
    else:
        session.verified = report
        gain = report.newest.ratio if report.newest else None
        kept = Decision(RowStatus.KEEP, "", fate.commit, policy.model_ms(report), report.model_speedup, gain)
        close(session, one.number, candidate, kept)


def _take_out(session: Session, one: Experiment, candidate: Candidate, commit: str, reason: str) -> None:
    detail = f"{policy.ISOLATED_ONLY}: {reason}"
    session.branch.take_out(kernel_path(candidate), commit, detail)
    close(session, one.number, candidate, Decision(RowStatus.DISCARD, detail))


def _commit(session: Session, one: Experiment, candidate: Candidate) -> str:
    assert one.verdict is not None
    assert one.verdict.timing is not None
    message = KeepMessage(
        experiment=one.number,
        target=candidate.target,
        speedup=one.verdict.timing.speedup_vs_best,
        description=candidate.description,
        verdict_sha256=session.store_verdict(one),
    )
    judged = session.store_source(one.number, candidate)
    return session.branch.keep(kernel_path(candidate), judged, message)


def _outdated(session: Session, one: Experiment) -> bool:
    """Whether another kernel stands now than the one that this winner was measured against."""
    against = session.journal.against(one.number)
    incumbent = session.incumbent(one.target)
    return bool(against) and against != _mark(incumbent.source if incumbent else None)


def _beaten(request: object) -> str:
    assert isinstance(request, JudgeRequest)
    return _mark(request.incumbent)


def _mark(source: str | None) -> str:
    """A kernel's name in the journal: a digest of its text; PyTorch's own has none."""
    return hashlib.sha256(source.encode()).hexdigest() if source is not None else "pytorch"

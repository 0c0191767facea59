"""One experiment from its proposal to the judges, and from its decision to its row."""

import shutil

from agent import policy
from agent.executors.bench import Bench
from agent.journal import Decision
from agent.measuring import judge_job
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, RowStatus
from agent.session import Session, note_tip
from agent.steering import taken


def begin(session: Session, bench: Bench, proposal: Candidate | InvalidReply) -> None:
    """Number and store a proposal; a candidate goes to the judges, what needs no judge gets its row."""
    number = open_experiment(session, proposal)
    if isinstance(proposal, Candidate) and not settle_unjudged(session, number, proposal):
        bench.submit(judge_job(session, number, proposal))
    else:
        finish(session, number)


def open_experiment(session: Session, proposal: Candidate | InvalidReply) -> int:
    """Number it, store it, put it into the worktree."""
    again = any(one.candidate == proposal for one in session.owed())
    number = session.journal.propose(proposal.target, proposal, again=again)
    session.store_source(number, proposal)
    for note in proposal.usage.notes:
        session.caution(note)
    if isinstance(proposal, Candidate):
        taken(session.places, proposal)
        session.branch.write(kernel_path(proposal), proposal.source.encode())
    return number


def settle_unjudged(session: Session, number: int, candidate: Candidate) -> bool:
    """A candidate that says what an earlier one said costs no judge time; returns whether this was one."""
    earlier = [one for one in session.experiments() if one.number != number]
    same = policy.duplicate_of(candidate, earlier)
    if same:
        state = f"was {same.status}" if same.status else "is not decided yet"
        detail = f"the same kernel as experiment {same.number}, which {state}"
        _decide(session, number, candidate, Decision(RowStatus.DUPLICATE, detail))
    return same is not None


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
    assert one is not None
    if one.state is not ExperimentState.DECIDED:
        _decide(session, number, one.candidate, _unkept(session, one, cut_off=cut_off))
    session.say(headline(session.record(number)))


def _unkept(session: Session, one: Experiment, *, cut_off: bool) -> Decision:
    """How an experiment without a winner ends; winners are agent.settling's."""
    if one.candidate is None:
        invalid = session.journal.invalid_reply(one.number)
        return Decision(RowStatus.INVALID_REPLY, invalid.reason if invalid else "")
    if one.verdict is None:
        assert cut_off
        return Decision(RowStatus.INTERRUPTED, "cut off before its verdict; judged again under the next number")
    return Decision(policy.row_status(one.verdict))


def close(session: Session, number: int, candidate: Candidate | None, what: Decision) -> None:
    """Decide an experiment and write its row."""
    _decide(session, number, candidate, what)
    finish(session, number)


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

"""Where the next candidate comes from: one that was cut off, else the proposer's idea for the best target."""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from agent import ranking
from agent.between import next_handed_in, unpinned
from agent.errors import BudgetReachedError
from agent.executors.bench import Bench
from agent.experiment import begin
from agent.proposers.base import Ordered
from agent.proposers.playbook.playbook import NAME as STARTERS
from agent.proposers.playbook.playbook import Playbook
from agent.records import REST, Attempt, Brief, Candidate, Move, NothingLeft, Proposal, RowStatus
from agent.search.lines import SEED, SWEEP, SWEEP_AT, stall
from agent.search.settings import Setting, apply_setting, read_setting
from agent.search.sweep import sweep_of
from agent.search.targets import next_target
from agent.session import Session
from harness.records import Target


def hand_out(session: Session, bench: Bench) -> bool:
    """Give the bench something to do: a candidate, or a question to a proposer that thinks at desks of its own.

    False when there is nothing to give now.
    """
    owed = session.owed()
    if owed and owed[0].candidate:
        begin(session, bench, owed[0].candidate)
        return True
    handed_in = next_handed_in(session)
    if handed_in:
        begin(session, bench, handed_in)
        return True
    passed: set[str] = set()
    while (target := choose_target(session, bench, passed)) is not None:
        brief = session.brief(target)
        free = None if isinstance(session.proposer, Ordered) else free_idea(brief)
        if free:
            begin(session, bench, free)
            return True
        if bench.desks:
            bench.ask(brief)
            return True
        try:
            proposal = session.proposer.propose(brief)
        except BudgetReachedError as error:
            session.reached = str(error)
            return False
        if take_idea(session, bench, proposal, brief):
            return True
        passed.add(target.id)
    return hand_out(session, bench) if unpinned(session) else False


def free_idea(brief: Brief) -> Candidate | None:
    """What costs no proposer's call once its kernels no longer get better: a setting of the best, a starter kernel."""
    best = brief.archive[0] if brief.archive else None
    if best and best.proposer != STARTERS and brief.plan.stalled >= SWEEP_AT:
        setting = sweep_of(best, brief.attempts, brief.in_flight)
        if setting:
            return swept(brief, best, setting)
    if brief.plan.move is Move.START and brief.plan.stalled >= SEED and not made_by(STARTERS, brief):
        found = Playbook().propose(replace(brief, attempts=()))
        return found if isinstance(found, Candidate) else None
    return None


def swept(brief: Brief, base: Attempt, setting: Setting) -> Candidate:
    """The best kernel with another setting of its TUNABLES."""
    change = read_setting(base.source)
    assert change is not None
    return Candidate(
        target=brief.target.id,
        backend=base.backend,
        source=apply_setting(base.source, setting),
        description=f"experiment {base.number} with {change.changes(setting)}",
        proposer="sweep",
        tactic=f"{SWEEP}experiment {base.number}: {setting.text}",
        hypothesis=f"{change.changes(setting)} suits this machine and shape better",
        parents=(base.number,),
    )


def made_by(proposer: str, brief: Brief) -> bool:
    """Whether a proposer has had its say on the target."""
    return proposer in {one.proposer for one in brief.attempts} | {one.proposer for one in brief.in_flight}


def take_idea(session: Session, bench: Bench, proposal: Proposal, brief: Brief) -> bool:
    """Begin an experiment with an idea; without one the target is parked, unless what is in flight may give one."""
    if not isinstance(proposal, NothingLeft):
        begin(session, bench, proposal)
        return True
    if bench.desks or not brief.in_flight:
        if proposal.target not in session.idle:
            session.say(f"{proposal.target} is parked: {proposal.reason}")
        session.idle[proposal.target] = session.keeps()  # the next keep moves shares: it is asked again then
    return False


def choose_target(session: Session, bench: Bench, passed: AbstractSet[str] = frozenset()) -> Target | None:
    """The search's choice, or that of a proposer with an order of its own (replay).

    Targets that the machine could not judge reliably, and those whose ladder has ended, come after all others.
    """
    experiments, parked = session.experiments(), session.closed() | passed
    if isinstance(session.proposer, Ordered):
        playable = [target for target in session.targets if target.id not in parked]
        return session.proposer.next_target(playable, experiments)
    seconds, asked = session.journal.judge_seconds(), bench.thinking_about()
    unwell = ranking.resting(experiments)
    for rested in (unwell | stalled(session), unwell, frozenset[str]()):
        chosen = next_target(session.targets, experiments, parked | rested, seconds, asked)
        if chosen:
            return chosen
    return None


def stalled(session: Session) -> frozenset[str]:
    """Targets whose ladder has ended and whose share no keep has moved since they were tried last."""
    last_keep = max((one.number for one in session.experiments() if one.status is RowStatus.KEEP), default=0)
    tried = {target.id: session.attempts(target.id) for target in session.targets}
    return frozenset(
        target for target, mine in tried.items() if mine and stall(mine) >= REST and mine[-1].number > last_keep
    )

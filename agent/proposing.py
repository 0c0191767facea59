"""Where the next candidate comes from: one that was cut off, else the proposer's idea for the best target."""

from collections.abc import Set as AbstractSet

from agent import ranking
from agent.between import next_handed_in, unpinned
from agent.executors.bench import Bench
from agent.experiment import begin
from agent.proposers.base import Ordered
from agent.records import Brief, NothingLeft, Proposal
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
    while (target := choose_target(session, passed)) is not None:
        brief = session.brief(target)
        if bench.desks:
            bench.ask(brief)
            return True
        if take_idea(session, bench, session.proposer.propose(brief), brief):
            return True
        passed.add(target.id)
    return hand_out(session, bench) if unpinned(session) else False


def take_idea(session: Session, bench: Bench, proposal: Proposal, brief: Brief) -> bool:
    """Begin an experiment with an idea; without one the target is parked, unless what is in flight may give one."""
    if not isinstance(proposal, NothingLeft):
        begin(session, bench, proposal)
        return True
    if bench.desks or not brief.in_flight:
        session.parked.add(proposal.target)
        session.say(f"{proposal.target} is parked: {proposal.reason}")
    return False


def choose_target(session: Session, passed: AbstractSet[str] = frozenset()) -> Target | None:
    """The ranking's choice, or that of a proposer with an order of its own (replay)."""
    experiments, parked = session.experiments(), session.closed() | passed
    if isinstance(session.proposer, Ordered):
        playable = [target for target in session.targets if target.id not in parked]
        return session.proposer.next_target(playable, experiments)
    seconds = session.journal.judge_seconds()
    rested = ranking.next_target(session.targets, experiments, parked | ranking.resting(experiments), seconds)
    return rested or ranking.next_target(session.targets, experiments, parked, seconds)

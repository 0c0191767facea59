"""What to do on a target: edit a line's best kernel, merge two, or start another line; a stall climbs the ladder.

A line is a kernel and what was made of it; up to three are worked on, of different origins, so that the search can
leave the hill that HEAD stands on. HEAD itself stays the best verified state: every candidate must beat it to be kept.
"""

from collections.abc import Sequence

from agent.records import REST, Attempt, Move, Plan, RowStatus
from agent.search.archive import archive, ranked, speed

LINES = 3
BETTER = 0.005  # less is noise
OTHER_LINE, MERGE, SEED = 3, 5, 7  # stalled attempts at which each rung of the ladder begins; it ends at REST
SWEEP = "sweep "  # how the tactic of a step of a sweep begins
NOT_TRIED = {RowStatus.INTERRUPTED, RowStatus.ENVIRONMENT, RowStatus.DUPLICATE, RowStatus.INVALID_REPLY}


def plan(attempts: Sequence[Attempt], in_flight: int = 0) -> Plan:
    """The next move, while `in_flight` candidates are being judged: each of them takes one place on the ladder."""
    stalled = stall(attempts)
    rung = (stalled + in_flight) % REST
    heads = line_heads(attempts)
    if not heads:
        return Plan(Move.START, stalled=stalled)
    kept = archive(attempts)
    if rung >= SEED or (rung >= OTHER_LINE and len(heads) == 1 and len(kept) == 1):
        return Plan(Move.START, stalled=stalled)
    if rung >= MERGE and len(kept) > 1:
        return Plan(Move.MERGE, kept[0], kept[1 + stalled % (len(kept) - 1)], stalled)
    place = 1 + stalled % (len(heads) - 1) if rung >= OTHER_LINE and len(heads) > 1 else 0
    return Plan(Move.EDIT, heads[place], None, stalled)


def line_heads(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The fastest correct kernel of each of the up to three best lines, the best line first."""
    roots = _roots(attempts)
    heads: dict[int, Attempt] = {}
    for one in ranked(attempts):
        heads.setdefault(roots[one.number], one)
    return list(heads.values())[:LINES]


def stall(attempts: Sequence[Attempt]) -> int:
    """Judged attempts since the last that was faster than all before it; steps of a sweep do not count."""
    best, stalled = 0.0, 0
    for one in attempts:
        if (speed(one) or 0.0) > best * (1 + BETTER):
            best, stalled = speed(one) or 0.0, 0
        elif one.status not in NOT_TRIED and not one.tactic.startswith(SWEEP):
            stalled += 1
    return stalled


def _roots(attempts: Sequence[Attempt]) -> dict[int, int]:
    """Each attempt's line, named by its first kernel: that of its first parent."""
    roots: dict[int, int] = {}
    for one in attempts:
        roots[one.number] = roots.get(one.parents[0], one.parents[0]) if one.parents else one.number
    return roots

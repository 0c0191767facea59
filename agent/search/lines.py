"""What to do on a target: edit a line's best kernel, merge two, or start another line; a stall climbs the ladder.

A line is a kernel and what was made of it; up to three are worked on, of different origins, so that the search can
leave the hill that HEAD stands on. HEAD itself stays the best verified state: every candidate must beat it to be kept.
Nothing is edited before a kernel has won or three lines have begun. On the ladder every third step leaves the best
line: to another line, to a merge, to a new line, and round again.
"""

from collections.abc import Sequence

from agent.records import Attempt, Move, Plan, RowStatus
from agent.search.archive import archive, ranked, speed

LINES = 3
WRONG_FOR_ONE = 4  # wrong kernels that count as one correct kernel which was no better
BETTER = 0.005  # less is noise
OTHER_LINE, EVERY = 24, 3  # stalled attempts before the first step off the best line, and between two
SWEEP_AT = SEED = 12  # stalled attempts after which TUNABLES are swept, and the starter kernels asked for a line
SWEEP = "sweep "  # how the tactic of a step of a sweep begins
NOT_TRIED = {RowStatus.INTERRUPTED, RowStatus.ENVIRONMENT, RowStatus.DUPLICATE, RowStatus.INVALID_REPLY}


def plan(attempts: Sequence[Attempt], in_flight: int = 0) -> Plan:
    """The next move, while `in_flight` candidates are being judged: each of them takes one place on the ladder."""
    stalled = stall(attempts)
    heads = line_heads(attempts)
    place = stalled + in_flight
    won = any(one.status is RowStatus.KEEP for one in attempts)
    if not heads or (not won and (len(heads) < LINES or place % 2)):
        return Plan(Move.START, stalled=stalled)
    if place < OTHER_LINE or place % EVERY:
        return Plan(Move.EDIT, heads[0], None, stalled)
    round_, rung = divmod((place - OTHER_LINE) // EVERY, 3)
    kept = archive(attempts)
    if rung == 0 and len(heads) > 1:
        return Plan(Move.EDIT, heads[1 + round_ % (len(heads) - 1)], None, stalled)
    if rung == 1 and len(kept) > 1:
        return Plan(Move.MERGE, kept[0], kept[1 + round_ % (len(kept) - 1)], stalled)
    return Plan(Move.START, stalled=stalled)


def line_heads(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The fastest correct kernel of each of the up to three best lines, the best line first."""
    roots = _roots(attempts)
    heads: dict[int, Attempt] = {}
    for one in ranked(attempts):
        heads.setdefault(roots[one.number], one)
    return list(heads.values())[:LINES]


def stall(attempts: Sequence[Attempt]) -> int:
    """Correct attempts since the last that was faster than all before it; steps of a sweep do not count.

    A wrong kernel says nothing about the hill it was meant to climb, but so many of them in a row do.
    """
    best, stalled, wrong = 0.0, 0, 0
    for one in attempts:
        if (speed(one) or 0.0) > best * (1 + BETTER):
            best, stalled, wrong = speed(one) or 0.0, 0, 0
        elif one.tactic.startswith(SWEEP) or one.status in NOT_TRIED:
            continue
        elif speed(one) is not None:
            stalled += 1
        else:
            wrong += 1
    return stalled + wrong // WRONG_FOR_ONE


def _roots(attempts: Sequence[Attempt]) -> dict[int, int]:
    """Each attempt's line, named by its first kernel: that of its first parent."""
    roots: dict[int, int] = {}
    for one in attempts:
        roots[one.number] = roots.get(one.parents[0], one.parents[0]) if one.parents else one.number
    return roots

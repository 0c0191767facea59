"""Which target is next: Thompson sampling over the expected gain of the whole model per minute of work.

share × headroom to the bound × chance of a win ÷ cost, the chance drawn from what the last attempts tell (older ones
tell less). Draws are seeded by the journal, so that a resumed session makes the same choices. Nobody starves: now and
then the target that has waited longest has its turn.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from agent.ranking import NO_EVIDENCE, Standing, gained, is_open, standing
from agent.records import Experiment, RowStatus
from harness.records import Target

DECAY = 0.9  # what an attempt one further back still tells
PRIOR_WINS, PRIOR_LOSSES = 1.0, 1.0
TURN_OF_THE_LONGEST_WAITING = 12  # every so many experiments
DEFAULT_COST_S = 30.0
MOST_WRONG = 4.0  # a share is not believed to be further off than this factor


def next_target(
    targets: Sequence[Target],
    experiments: Sequence[Experiment],
    parked: AbstractSet[str],
    judge_seconds: Mapping[str, float],
    waiting: Collection[str] = (),
) -> Target | None:
    """The target to work on; None when nothing is left to do. `waiting` names those that proposers think about now."""
    usual_s = sum(judge_seconds.values()) / len(judge_seconds) if judge_seconds else DEFAULT_COST_S
    shares = shares_now(targets, experiments)
    standings = [
        replace(standing(one, experiments, judge_seconds.get(one.id, usual_s)), share=shares[one.id]) for one in targets
    ]
    open_ones = [one for one in standings if is_open(one, frozenset(parked))]
    if not open_ones:
        return None
    turn = len(experiments) + len(waiting)
    if turn % TURN_OF_THE_LONGEST_WAITING == TURN_OF_THE_LONGEST_WAITING - 1:
        return min(open_ones, key=lambda one: _last_turn(one.target.id, experiments, waiting)).target
    return max(open_ones, key=lambda one: _drawn_gain(one, experiments, waiting, turn)).target


def _drawn_gain(one: Standing, experiments: Sequence[Experiment], waiting: Collection[str], turn: int) -> float:
    wins, losses = evidence(one.target.id, experiments, waiting)
    seed = hashlib.sha256(f"{one.target.id} {turn}".encode()).digest()
    chance = random.Random(seed).betavariate(wins, losses)
    return one.share * one.headroom * chance / one.cost_s


def shares_now(targets: Sequence[Target], experiments: Sequence[Experiment]) -> dict[str, float]:
    """Each target's share of the profiled model's time as it is now: measured again by each keep.

    A kernel g times faster that makes the model r times faster had the share (1 - 1/r) ÷ (1 - 1/g) (Amdahl). It is
    averaged with what was believed before, for both ratios have noise.
    """
    shares, total = {target.id: target.share for target in targets}, 1.0
    for one in experiments:
        gain = gained([one]) if one.status is RowStatus.KEEP else 1.0
        if one.target not in shares or gain <= 1.0:
            continue
        before = shares[one.target]
        if one.model_gain:
            measured = (1 - 1 / one.model_gain) / (1 - 1 / gain) * total
            before = (before + min(max(measured, before / MOST_WRONG), before * MOST_WRONG)) / 2
            total /= one.model_gain
        shares[one.target] = before / gain
    return shares


def evidence(target: str, experiments: Sequence[Experiment], waiting: Collection[str] = ()) -> tuple[float, float]:
    """Decayed wins and losses with the prior; what is not decided yet counts as lost, so that it is not asked twice."""
    mine = [one for one in experiments if one.target == target and one.status not in NO_EVIDENCE]
    decided = [one for one in mine if one.status is not None]
    wins, losses = PRIOR_WINS, PRIOR_LOSSES + len(mine) - len(decided) + list(waiting).count(target)
    for age, one in enumerate(reversed(decided)):
        weight = DECAY**age
        wins += weight * (one.status is RowStatus.KEEP)
        losses += weight * (one.status is not RowStatus.KEEP)
    return wins, losses


def _last_turn(target: str, experiments: Sequence[Experiment], waiting: Collection[str]) -> int:
    if target in waiting:
        return len(experiments) + 1
    return max((one.number for one in experiments if one.target == target), default=0)

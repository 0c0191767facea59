"""Which of several language models to ask: a bandit over wins per dollar, weighted by the user. Pure."""

import random
from collections.abc import Iterable, Sequence

from agent.records import LanguageModel, Outcome, RowStatus

NO_EVIDENCE = {RowStatus.ENVIRONMENT, RowStatus.INTERRUPTED}
CHEAPEST_USD = 0.002  # below this price of a reply, judging costs more than asking


def in_order(models: Sequence[LanguageModel], history: Sequence[Outcome], seed: str) -> list[LanguageModel]:
    """The models by one draw of the bandit, the one to ask first in front."""
    draw = random.Random(seed)
    dearest = max((_mean_cost(one.model, history) for one in models), default=0.0)
    scored = [(_worth(one, history, draw) / _price_factor(one, history, dearest), one) for one in models]
    return [one for _, one in sorted(scored, key=lambda pair: -pair[0])]


def _worth(model: LanguageModel, history: Iterable[Outcome], draw: random.Random) -> float:
    mine = [one for one in history if one.model == model.model and one.status not in NO_EVIDENCE]
    wins = sum(one.status is RowStatus.KEEP for one in mine)
    return model.weight * draw.betavariate(1.0 + wins, 3.0 + len(mine) - wins)


def _price_factor(model: LanguageModel, history: Sequence[Outcome], dearest: float) -> float:
    """How dear a reply is beside the dearest model's, softly: ten times dearer must win about twice as often."""
    cost = _mean_cost(model.model, history)
    if dearest <= CHEAPEST_USD:
        return 1.0
    return float((max(cost, CHEAPEST_USD) / dearest) ** 0.3)


def _mean_cost(model: str, history: Iterable[Outcome]) -> float:
    costs = [one.cost_usd for one in history if one.model == model and one.cost_usd]
    return sum(costs) / len(costs) if costs else 0.0

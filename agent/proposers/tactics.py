"""The catalogue of tactics (kernels/tactics/*.yaml) and which one to try next: a bandit masked by the bottleneck. Pure.

Thompson sampling with a seed that the session's history gives, so a resumed session chooses what it would have chosen.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent.records import Brief, Outcome, RowStatus
from harness import wire
from harness.records import Target

TRANSLATE = "translate"
REPAIR_MARK = "~"
MOST_REPAIRS = 2
REPAIRABLE = {RowStatus.INCORRECT, RowStatus.CRASH, RowStatus.TIMEOUT}
NO_EVIDENCE = {RowStatus.ENVIRONMENT, RowStatus.INTERRUPTED, RowStatus.INVALID_REPLY, RowStatus.DUPLICATE}
OTHER_KIND = 0.3  # what a result on another kind of target tells about this one
FITTING_PRIOR = 2.0  # how much more a tactic made for this kind is believed in than a general one
NEAR_WIN = 0.25  # a correct kernel that was not faster: the idea can be carried out


@dataclass(frozen=True)
class Tactic:
    """One idea: when it applies, what it should bring, how it is done in each language; empty lists mean any."""

    name: str
    title: str
    hypothesis: str
    cost: str  # low, medium, high: how much of a file it rewrites
    kinds: tuple[str, ...] = ()
    bottlenecks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    triton: str = ""
    cuda: str = ""
    cpp: str = ""

    def applies(self, target: Target, device: str, limit: str) -> bool:
        """Whether it can help a target that `limit` holds back."""
        return (
            (not self.kinds or any(kind in target.kind for kind in self.kinds))
            and (not self.bottlenecks or limit in self.bottlenecks)
            and (not self.devices or device in self.devices)
        )

    def how(self, device: str) -> Mapping[str, str]:
        """How it is done, by language, on that device."""
        languages = {"cuda": ("triton", "cuda"), "cpu": ("cpp",)}[device]
        return {name: getattr(self, name) for name in languages if getattr(self, name)}


@lru_cache(maxsize=4)
def catalogue(folder: Path) -> tuple[Tactic, ...]:
    """All tactics of a folder in the order of files and entries."""
    import yaml

    entries: list[Any] = []
    for path in sorted(folder.glob("*.yaml")):
        entries += yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(wire.from_data(Tactic, entry) for entry in entries)


def bottleneck(target: Target, peaks: Mapping[str, float]) -> str:
    """What holds a target back by the roofline: "launch", "memory" or "compute"."""
    if target.launch_bound:
        return "launch"
    copy = next((value for name, value in peaks.items() if "copy" in name), 0.0)
    product = max((value for name, value in peaks.items() if "matmul" in name), default=0.0)
    if not copy or not product or not target.bytes:
        return "memory"
    return "compute" if target.flops / product > target.bytes / copy else "memory"


def next_tactic(brief: Brief, tactics: Sequence[Tactic], *, has_base: bool) -> Tactic:
    """The tactic to try; a target without any correct kernel is translated first."""
    by_name = {one.name: one for one in tactics}
    if not has_base and _tries(brief, TRANSLATE) < 2:
        return by_name[TRANSLATE]
    limit = bottleneck(brief.target, brief.peaks)
    fitting = [one for one in tactics if one.name != TRANSLATE and one.applies(brief.target, brief.device, limit)]
    draw = random.Random(f"{brief.target.id}:{len(brief.history)}:{len(brief.attempts)}")
    return max(fitting, key=lambda one: _sample(one, brief, draw)) if fitting else by_name[TRANSLATE]


def repair_of(tactic: str) -> tuple[str, int]:
    """The tactic's own name and how many repairs its candidate has had."""
    name, _, count = tactic.partition(REPAIR_MARK)
    return name, int(count) if count.isdigit() else 0


def _tries(brief: Brief, name: str) -> int:
    return sum(repair_of(one.tactic)[0] == name for one in brief.attempts if one.status not in NO_EVIDENCE)


def _sample(tactic: Tactic, brief: Brief, draw: random.Random) -> float:
    wins, losses = _evidence(tactic.name, brief.target.kind, brief.history)
    prior = FITTING_PRIOR if tactic.kinds else 1.0
    return draw.betavariate(prior + wins, 2.0 + losses)


def _evidence(name: str, kind: str, history: Iterable[Outcome]) -> tuple[float, float]:
    wins = losses = 0.0
    for one in history:
        if repair_of(one.tactic)[0] != name or one.status in NO_EVIDENCE:
            continue
        weight = 1.0 if one.kind == kind else OTHER_KIND
        worth = {RowStatus.KEEP: 1.0, RowStatus.DISCARD: NEAR_WIN}.get(one.status, 0.0)
        wins += weight * worth
        losses += weight * (1.0 - worth)
    return wins, losses

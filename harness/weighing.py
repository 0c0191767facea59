"""One profile of several input sets (prefill and decode, several lengths), each weighted by what it stands for.

A model's time is the weighted sum over its sets, and a target's share is of that. Targets that are the same region at
other sizes (equal patterns) are one, checked at the sizes of all sets; what occurs in one set alone stays a target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from harness.records import ProfileReport, Target

Samples = Mapping[str, Sequence[tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Weighed:
    """The profile of one input set, and how much of the model's use the set stands for."""

    name: str
    weight: float
    report: ProfileReport
    samples: Samples


def merged(sets: Sequence[Weighed]) -> tuple[ProfileReport, dict[str, list[tuple[torch.Tensor, ...]]]]:
    """One report, ranked, and the samples of its targets by their ids in it. Weights must not all be zero."""
    first = sets[0].report
    scale = sum(one.weight for one in sets)
    total_ms = sum(one.weight * one.report.total_ms for one in sets) / scale
    parts = {one.name: one.weight * one.report.total_ms / scale / total_ms for one in sets}
    targets: dict[str, Target] = {}
    ids: dict[str, str] = {}
    samples: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    for one in sets:
        keys = {target.id: target.key for target in one.report.targets}
        for target in sorted(one.report.targets, key=lambda target: bool(target.members)):  # a fusion names its members
            members = tuple(ids[keys[member]] for member in target.members)
            there = replace(target, share=target.share * parts[one.name], members=members)
            if target.key in targets:
                targets[target.key] = _joined(targets[target.key], there)
            else:
                ids[target.key] = _free_id(target, set(ids.values()))
                targets[target.key] = replace(there, id=ids[target.key])
                samples[ids[target.key]] = list(one.samples.get(target.id, ()))  # at the target's first size
    ranked = sorted(targets.values(), key=lambda target: (-target.model_gain(), -target.share, target.id))
    said = [f"{name}: {part:.0%} of the weighted time" for name, part in parts.items()]
    report = replace(
        first,
        total_ms=total_ms,
        idle_share=sum(parts[one.name] * one.report.idle_share for one in sets),
        uncaptured_share=sum(parts[one.name] * one.report.uncaptured_share for one in sets),
        targets=tuple(ranked),
        notes=(*said, *dict.fromkeys(note for one in sets for note in one.report.notes)),
    )
    return report, samples


def _free_id(target: Target, taken: set[str]) -> str:
    if target.id not in taken:
        return target.id
    number = 1
    while f"{target.kind}_{number}" in taken:
        number += 1
    return f"{target.kind}_{number}"


def _joined(one: Target, other: Target) -> Target:
    """The same region in two sets: judged at the sizes of both; per-call time and work are the costlier set's."""
    more = tuple(bindings for bindings in other.bindings if bindings not in one.bindings)
    costly = other if other.share > one.share else one
    return replace(
        one,
        bindings=(*one.bindings, *more),
        share=one.share + other.share,
        time_us=costly.time_us,
        floor_us=costly.floor_us,
        launch_bound=costly.launch_bound,
    )

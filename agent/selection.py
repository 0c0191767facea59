"""Which kept kernels to apply where fusions overlap what they are made of and each other. Pure and exact.

A fusion comes before its members at the sites that it covers, so choosing one costs what its members save there; at
other sites they stay. Two fusions that share a member exclude each other. What is left is a maximum-weight
independent set, solved by trying, component by component, with what remains as the bound.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.records import Target


def best_disjoint(targets: Sequence[Target], saved_ms: Mapping[str, float]) -> frozenset[str]:
    """The kept targets to apply: most time saved; of equal choices the one without fusions, then the first listed."""
    kept = [target for target in targets if target.id in saved_ms]
    sites = {target.id: len(target.call_sites) for target in targets}
    fusions = [target for target in kept if target.members]
    worth = {one.id: saved_ms[one.id] - _displaced(one, sites, saved_ms) for one in fusions}
    useful = [one for one in fusions if worth[one.id] > 0]
    chosen = [one for component in _components(useful) for one in _best(component, worth)]
    covered: Counter[str] = Counter()
    for one in chosen:
        covered.update(_covers(one, sites))
    staying = [one.id for one in kept if not one.members and covered[one.id] < max(sites[one.id], 1)]
    return frozenset([*staying, *(one.id for one in chosen)])


def _covers(fusion: Target, sites: Mapping[str, int]) -> Counter[str]:
    """How many sites of each member a fusion takes over."""
    return Counter(
        {member: times * max(sites.get(fusion.id, 1), 1) for member, times in Counter(fusion.members).items()}
    )


def _displaced(fusion: Target, sites: Mapping[str, int], saved_ms: Mapping[str, float]) -> float:
    """What kept members would save where the fusion takes their place."""
    return sum(
        saved_ms.get(member, 0.0) * min(count / max(sites.get(member, 1), 1), 1.0)
        for member, count in _covers(fusion, sites).items()
    )


def _components(fusions: Sequence[Target]) -> list[list[Target]]:
    """Fusions that overlap, directly or through others, together; each in the caller's order."""
    found: list[list[Target]] = []
    for one in fusions:
        touching = [group for group in found if any(_overlap(one, other) for other in group)]
        found = [group for group in found if group not in touching]
        found.append([*(other for group in touching for other in group), one])
    return found


def _overlap(one: Target, other: Target) -> bool:
    return not set(one.members).isdisjoint(other.members)


def _best(fusions: Sequence[Target], worth: Mapping[str, float]) -> list[Target]:
    """The heaviest choice of fusions no two of which overlap."""
    ordered = sorted(fusions, key=lambda one: -worth[one.id])
    best: list[Target] = []
    best_sum = 0.0

    def search(index: int, chosen: list[Target], total: float, remaining: float) -> None:
        nonlocal best, best_sum
        if total > best_sum:
            best, best_sum = list(chosen), total
        if index == len(ordered) or total + remaining <= best_sum:
            return
        one = ordered[index]
        left = remaining - worth[one.id]
        if not any(_overlap(one, other) for other in chosen):
            search(index + 1, [*chosen, one], total + worth[one.id], left)
        search(index + 1, chosen, total, left)

    search(0, [], 0.0, sum(worth[one.id] for one in ordered))
    return best

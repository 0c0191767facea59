"""Which kept kernels are applied where fusions overlap: against trying every choice."""

import itertools
import random
from collections import Counter
from dataclasses import replace

from tests_support import target

from agent.selection import best_disjoint
from harness.records import CallSite


def sited(name, sites, members=()):
    places = tuple(CallSite(0, f"{name}.{index}", "m.py:1") for index in range(sites))
    return replace(target(name, 0.1, members=tuple(members)), call_sites=places)


def test_a_fusion_is_weighed_against_what_it_covers():
    targets = [target("a", 0.3), target("b", 0.3), target("ab", 0.6, members=("a", "b")), target("c", 0.1)]
    assert best_disjoint(targets, {"a": 1.0, "b": 1.0, "ab": 1.5, "c": 0.1}) == {"a", "b", "c"}
    assert best_disjoint(targets, {"a": 1.0, "b": 1.0, "ab": 2.5}) == {"ab"}
    assert best_disjoint(targets, {"a": 1.0, "ab": 1.5}) == {"ab"}
    assert best_disjoint(targets, {}) == frozenset()


def test_a_member_stays_at_the_sites_that_no_fusion_covers():
    targets = [sited("linear", 4), sited("gelu", 2), sited("linear_gelu", 2, ("linear", "gelu"))]
    assert best_disjoint(targets, {"linear": 4.0, "linear_gelu": 2.5}) == {"linear", "linear_gelu"}
    assert best_disjoint(targets, {"linear": 4.0, "linear_gelu": 1.5}) == {"linear"}
    twice = sited("both", 2, ("linear", "linear"))
    assert best_disjoint([targets[0], twice], {"linear": 4.0, "both": 4.5}) == {"both"}


def test_of_two_overlapping_fusions_the_better_one_is_chosen_and_of_a_chain_its_ends():
    chain = [sited(name, 1) for name in "abcd"]
    fusions = [sited("ab", 1, "ab"), sited("bc", 1, "bc"), sited("cd", 1, "cd")]
    assert best_disjoint([*chain, *fusions], {"ab": 1.0, "bc": 1.5}) == {"bc"}
    assert best_disjoint([*chain, *fusions], {"ab": 1.0, "bc": 1.5, "cd": 1.0}) == {"ab", "cd"}


def value(chosen, targets, saved):
    """What a choice saves: fusions first, members at the sites left over; None where two fusions share a member."""
    sites = {one.id: len(one.call_sites) for one in targets}
    fusions = [one for one in targets if one.members and one.id in chosen]
    if any(set(a.members) & set(b.members) for a, b in itertools.combinations(fusions, 2)):
        return None
    covered = Counter()
    for one in fusions:
        covered.update({name: times * sites[one.id] for name, times in Counter(one.members).items()})
    rest = [one for one in targets if not one.members and one.id in chosen]
    left = sum(saved[one.id] * max(0.0, 1 - covered[one.id] / sites[one.id]) for one in rest)
    return left + sum(saved[one.id] for one in fusions)


def test_the_choice_is_as_good_as_the_best_of_all():
    draw = random.Random(4)
    for _ in range(300):
        cover = [sited(f"t{index}", draw.randint(1, 6)) for index in range(6)]
        fusions = []
        for index in range(5):
            parts = draw.sample(cover, draw.randint(1, 3))
            most = min(len(part.call_sites) for part in parts)
            fusions.append(sited(f"f{index}", draw.randint(1, most), [part.id for part in parts]))
        targets = [*cover, *fusions]
        saved = {one.id: draw.uniform(0.1, 3) for one in targets if draw.random() < 0.7}
        everything = [
            found
            for size in range(len(saved) + 1)
            for names in itertools.combinations(saved, size)
            if (found := value(names, targets, saved)) is not None
        ]
        assert abs(value(best_disjoint(targets, saved), targets, saved) - max(everything)) < 1e-9

"""Several input sets make one profile, each weighted by how much of the model's use it stands for."""

from dataclasses import replace

import pytest
import torch
from captured import load

from harness.capture import capture
from harness.records import ProfileReport
from harness.targets import draft_targets, finish
from harness.weighing import Weighed, merged


@pytest.fixture(scope="module")
def targets():
    """The small GPT-2's targets at its own length and at another one."""
    loaded = load("gpt2")
    found = []
    for ids in (loaded.args[0], loaded.args[0].repeat(2, 1)[:, :10]):
        drafts = draft_targets(capture(replace(loaded, args=(ids,))))
        found.append([replace(finish(draft, {}), share=0.05, time_us=10.0) for draft in drafts])
    return found


def report_of(targets, total_ms):
    return ProfileReport("GPT2", "cpu", "a CPU", "compile", total_ms, 0.1, 0.2, tuple(targets), {}, ("a note",))


def weighed(targets, weights=(1.0, 3.0), totals=(10.0, 2.0)):
    return [
        Weighed(name, weight, report_of(found, total), {target.id: [(torch.zeros(index),)] for target in found})
        for index, (name, weight, total, found) in enumerate(
            zip(("long", "short"), weights, totals, targets, strict=True)
        )
    ]


def test_time_is_the_weighted_mean_and_shares_are_of_it(targets):
    report, _ = merged(weighed(targets))
    assert report.total_ms == pytest.approx((10.0 + 3 * 2.0) / 4)
    assert sum(target.share for target in report.targets) == pytest.approx(
        (10 * 0.05 * len(targets[0]) + 6 * 0.05 * len(targets[1])) / 16
    )
    assert "long: 62% of the weighted time" in report.notes
    assert report.notes.count("a note") == 1


def test_equal_regions_of_two_sets_are_one_target_judged_at_the_sizes_of_both(targets):
    report, samples = merged(weighed(targets))
    assert len(report.targets) < len(targets[0]) + len(targets[1])
    joined = [
        target
        for target in report.targets
        if target.bindings[: len(targets[0][0].bindings)] and len(target.bindings) > 3
    ]
    assert joined
    assert len({target.id for target in report.targets}) == len(report.targets)
    assert set(samples) == {target.id for target in report.targets}
    assert all(samples[target.id][0][0].numel() == 0 for target in joined), "samples are of the first size"


def test_a_set_that_counts_more_weighs_more(targets):
    often = merged(weighed(targets, weights=(1.0, 100.0)))[0]
    assert often.total_ms == pytest.approx((10 + 200) / 101)


def test_a_fusion_keeps_its_members_where_their_ids_change(targets):
    first, second = ([one for one in found if not one.members][:3] for found in targets)
    shifted = [replace(one, id=f"{one.kind}_9{index}") for index, one in enumerate(second)]
    fused = replace(shifted[0], id="fused_1", key="another", members=(shifted[1].id, shifted[0].id))
    report, _ = merged(weighed([first, [fused, *shifted]]))
    by_id = {one.id: one for one in report.targets}
    assert [by_id[member].key for member in by_id["fused_1"].members] == [second[1].key, second[0].key]

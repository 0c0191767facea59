"""The search, a pure function of the journal: targets, lines, the stall ladder, the archive and sweeps."""

from collections import Counter
from dataclasses import replace

import pytest
from tests_support import target, verdict

from agent.records import (
    Attempt,
    Brief,
    Candidate,
    Experiment,
    ExperimentState,
    Move,
    RowStatus,
)
from agent.search.archive import SIZE, archive, structure_of
from agent.search.lines import EVERY, LINES, OTHER_LINE, line_heads, plan, stall
from agent.search.settings import read_setting
from agent.search.sweep import PATIENCE, Trial, losing_streak, next_setting, sweep_of
from agent.search.targets import TURN_OF_THE_LONGEST_WAITING, evidence, next_target, shares_now
from harness.records import Status

KEEP, DISCARD = RowStatus.KEEP, RowStatus.DISCARD


def experiment(number, name, status, *, speedup=1.5, gain=None):
    judged = verdict(Status(status), speedup) if status in {KEEP, DISCARD} else None
    candidate = Candidate(name, "cpp", str(number), "d", "p")
    return Experiment(
        number, name, ExperimentState.RECORDED, candidate, status, judged, None, "2026-11-30T20:00:00Z", None,
        model_gain=gain,
    )  # fmt: skip


def choices(targets, rounds, outcome, *, seconds=None, parked=()):
    """A simulated night: which target was chosen each time; `outcome` says how an experiment on one ended."""
    experiments = []
    for number in range(1, rounds + 1):
        chosen = next_target(targets, experiments, frozenset(parked), seconds or {})
        if chosen is None:
            break
        experiments.append(experiment(number, chosen.id, *outcome(chosen.id)))
    return [one.target for one in experiments], experiments


def lost(_name):
    return (DISCARD,)


# Targets


def test_most_work_goes_where_most_can_be_saved_and_nobody_starves():
    targets = [target(name, share) for name, share in (("large", 0.6), ("middle", 0.2), ("small", 0.02))]
    counts = Counter(choices(targets, 60, lost)[0])
    assert counts["large"] > counts["middle"] > 0
    assert counts["small"] >= 60 // TURN_OF_THE_LONGEST_WAITING - 1


def test_a_resumed_search_makes_the_same_choices():
    targets = [target(name, share) for name, share in (("a", 0.3), ("b", 0.25), ("c", 0.2))]
    names, experiments = choices(targets, 30, lost)
    for done in range(30):
        assert next_target(targets, experiments[:done], frozenset(), {}).id == names[done]


def test_a_target_that_keeps_losing_gives_way_and_is_tried_again_later():
    targets = [target("a", 0.4), target("b", 0.3)]
    names, _ = choices(targets, 40, lambda name: (KEEP if name == "b" else DISCARD,))
    assert "a" in names[-20:]
    only_losses = [experiment(n, "a", DISCARD) for n in range(1, 9)]
    drawn = Counter(
        next_target(targets, [*only_losses, *(experiment(9 + n, "z", DISCARD) for n in range(extra))], set(), {}).id
        for extra in range(40)
    )
    assert drawn["b"] > drawn["a"] > 0


def test_old_losses_weigh_less_than_new_ones():
    old_win = [experiment(1, "a", KEEP), *(experiment(n, "a", DISCARD) for n in range(2, 6))]
    new_win = [*(experiment(n, "a", DISCARD) for n in range(1, 5)), experiment(5, "a", KEEP)]
    assert evidence("a", new_win)[0] > evidence("a", old_win)[0]
    assert evidence("a", [])[0] == evidence("a", [])[1]


def test_what_is_in_flight_or_being_thought_about_counts_as_lost_until_it_is_known():
    running = replace(experiment(1, "a", DISCARD), status=None, state=ExperimentState.PROPOSED)
    assert evidence("a", [running])[1] == evidence("a", [], ["a"])[1] == 2.0
    targets = [target("a", 0.3), target("b", 0.29)]
    asked = []
    for _ in range(6):
        asked.append(next_target(targets, [], frozenset(), {}, asked).id)
    assert set(asked) == {"a", "b"}


def test_interrupted_and_environment_rows_say_nothing_about_a_target():
    nothing = [experiment(n, "a", RowStatus.ENVIRONMENT) for n in range(1, 9)]
    assert evidence("a", nothing) == evidence("a", [])


def test_a_target_within_92_percent_of_its_bound_is_done():
    assert next_target([target("a", 0.5, floor=0.93)], [], frozenset(), {}) is None
    assert next_target([target("a", 0.5, floor=0.5)], [experiment(1, "a", KEEP, speedup=1.9)], frozenset(), {}) is None


def test_parked_targets_and_those_whose_proposer_goes_in_circles_are_left():
    circles = [experiment(n, "a", RowStatus.DUPLICATE) for n in range(1, 6)]
    pair = [target("a", 0.5), target("b", 0.1)]
    assert next_target(pair, [], {"a"}, {}).id == "b"
    assert next_target(pair, circles, frozenset(), {}).id == "b"
    assert next_target(pair, circles, {"b"}, {}) is None


def test_of_two_equal_targets_the_dearer_gets_less_work():
    targets = [target("a", 0.3), target("b", 0.3)]
    counts = Counter(choices(targets, 60, lost, seconds={"a": 60.0, "b": 10.0})[0])
    assert counts["b"] > 1.5 * counts["a"]


def test_a_keep_measures_the_share_again_and_the_others_are_revisited():
    targets = [target("a", 0.5), target("b", 0.5)]
    # twice as fast, the model 1.111 times: its share was 0.2, not 0.5; of what is believed it is half way
    shares = shares_now(targets, [experiment(1, "a", KEEP, speedup=2.0, gain=1 / 0.9)])
    assert shares["a"] == pytest.approx((0.5 + 0.2) / 2 / 2)
    assert shares["b"] == 0.5
    assert shares_now(targets, [experiment(1, "a", KEEP, speedup=2.0)])["a"] == pytest.approx(0.25)
    absurd = shares_now(targets, [experiment(1, "a", KEEP, speedup=1.01, gain=3.0)])
    assert absurd["a"] < 0.5 * 4


# Lines and the ladder


def attempt(number, ratio=None, *, parents=(), tactic="", source=None, backend="cpp", status=DISCARD):
    judged = None if ratio is None else verdict(Status.DISCARD)
    if judged:
        judged = replace(judged, timing=replace(judged.timing, eager_us=10.0, candidate_us=10.0 / ratio))
    text = source if source is not None else f"x = {number}"
    return Attempt(number, "", text, backend, tactic, "", status, judged, parents)


def test_a_line_is_a_kernel_and_what_was_made_of_it_and_the_best_three_are_worked_on():
    attempts = [attempt(1, 1.0), attempt(2, 1.4, parents=(1,)), attempt(3, 1.2), attempt(4, 1.3, parents=(2,)),
                attempt(5, 1.1), attempt(6, 0.9), attempt(7, parents=(3,), status=RowStatus.INCORRECT)]  # fmt: skip
    assert [one.number for one in line_heads(attempts)] == [2, 3, 5]
    assert len(line_heads(attempts)) == LINES


def test_nothing_is_edited_before_a_kernel_has_won_or_three_lines_have_begun():
    lost_ones = [attempt(1, 0.8), attempt(2, 0.9)]
    assert plan(lost_ones).move is Move.START
    assert plan([*lost_ones, attempt(3, 1.2, status=KEEP)]).move is Move.EDIT
    assert {plan([*lost_ones, attempt(3, 0.7), *(attempt(4, 0.7),) * extra]).move for extra in (0, 1)} == {
        Move.START, Move.EDIT
    }  # fmt: skip


def test_the_ladder_leaves_the_best_line_every_third_step_for_another_a_merge_and_a_new_one():
    two_lines = [attempt(1, 1.5, backend="cpp", status=KEEP), attempt(2, 1.2, backend="library")]
    failing = [attempt(n, 1.0, parents=(1,)) for n in range(3, 99)]
    plans = [plan([*two_lines, *failing[: count - 1]]) for count in range(1, OTHER_LINE + 6 * EVERY)]
    assert [one.stalled for one in plans] == list(range(1, OTHER_LINE + 6 * EVERY))
    moves = [(one.move, one.base.number if one.base else None) for one in plans]
    assert set(moves[: OTHER_LINE - 1]) == {(Move.EDIT, 1)}
    ladder = moves[OTHER_LINE - 1 :: EVERY]
    assert ladder[:3] == [(Move.EDIT, 2), (Move.MERGE, 1), (Move.START, None)]
    assert ladder[3:6] == ladder[:3]
    assert plans[OTHER_LINE - 1 + EVERY].parents == (1, 2)


def test_a_better_kernel_of_any_line_ends_the_stall_and_noise_does_not():
    attempts = [attempt(1, 1.5), *(attempt(n, 1.0) for n in range(2, 6))]
    assert stall(attempts) == 4
    assert stall([*attempts, attempt(6, 1.501)]) == 5
    assert stall([*attempts, attempt(6, 1.6)]) == 0


def test_sweeps_duplicates_and_machine_failures_climb_no_ladder():
    quiet = [attempt(2, 1.0, tactic="sweep x: A=1"), attempt(3, status=RowStatus.DUPLICATE),
             attempt(4, status=RowStatus.ENVIRONMENT), attempt(5, status=RowStatus.INVALID_REPLY)]  # fmt: skip
    assert stall([attempt(1, 1.5), *quiet]) == 0
    assert stall([attempt(1, 1.5), *quiet, attempt(6, 1.0)]) == 1


def test_candidates_in_flight_take_their_places_on_the_ladder():
    attempts = [attempt(1, 1.5, backend="cpp", status=KEEP), attempt(2, 1.2, backend="library")]
    assert plan(attempts, in_flight=0).move is Move.EDIT
    assert plan(attempts, in_flight=OTHER_LINE + EVERY - 1).move is Move.MERGE


def test_wrong_kernels_climb_the_ladder_slowly():
    wrong = [attempt(n, status=RowStatus.INCORRECT) for n in range(2, 14)]
    assert stall([attempt(1, 1.5), *wrong]) == 3


def test_without_a_correct_kernel_the_proposer_starts_one():
    assert plan([]).move is Move.START
    assert plan([attempt(1, status=RowStatus.CRASH)]).move is Move.START


# Archive


TRITON = "@triton.jit\ndef k(x): ...\n"
BLOCKED = 'TUNABLES = {"BLOCK": [%d, 2]}\n'


def test_kernels_are_binned_by_backend_tile_flow_and_how_many_are_launched():
    plain = structure_of(TRITON, "triton")
    assert plain != structure_of(TRITON + "tl.num_programs(0)", "triton")
    assert plain != structure_of(TRITON + "for i in tl.range(n, num_stages=3): ...", "triton")
    assert plain != structure_of(TRITON * 2, "triton")
    assert plain != structure_of(TRITON, "cuda")
    assert plain != structure_of("return torch.softmax(x, -1)", "triton")
    small, large = (structure_of(BLOCKED % size + TRITON, "triton") for size in (256, 65536))
    assert (small.tile, large.tile) == ("small", "large")
    assert structure_of(BLOCKED % 256 + TRITON, "triton") == structure_of(BLOCKED % 512 + TRITON, "triton")


def test_the_archive_keeps_the_best_of_each_structure_and_a_dozen_at_most():
    attempts = [
        attempt(1, 1.1),
        attempt(2, 1.3),
        attempt(3, 1.2, backend="library"),
        attempt(4, status=RowStatus.CRASH),
    ]
    assert [one.number for one in archive(attempts)] == [2, 3]
    shapes = [BLOCKED % size + flow + launch for size in (2, 4096, 65536)
              for flow in ("", "cp.async\n", "gridDim.x\n") for launch in ("", TRITON, TRITON * 2)]  # fmt: skip
    many = [attempt(number, 1 + number / 100, source=text) for number, text in enumerate(shapes, 1)]
    assert len(archive(many)) == SIZE
    assert archive(many)[0].number == len(shapes)


# Sweeps


FILE = 'TUNABLES = {"B": [1, 2, 4, 8], "W": [1, 2], "S": [0, 1]}\ndef kernel_fn(x):\n    return x\n'


def setting(**chosen):
    found = read_setting(FILE)
    for name, choice in chosen.items():
        found = found.with_choice(name, choice)
    return found


def test_a_sweep_climbs_past_misleading_pairs_repeats_nothing_and_ends_by_itself():
    def speed(one):  # W and S help only together: each alone costs
        both = one.current["W"] == 2 and one.current["S"] == 1
        either = one.current["W"] == 2 or one.current["S"] == 1
        return 1.5 if both else 0.97 if either else 1.0 + one.current["B"] / 100

    trials = [Trial(setting(), speed(setting()))]
    while (found := next_setting(trials)) is not None:
        trials.append(Trial(found, speed(found)))
    assert len({one.setting.text for one in trials}) == len(trials)
    assert max(one.speed for one in trials) >= 1.08
    assert len(trials) < 16


def test_a_sweep_stops_when_nothing_gets_better_and_a_running_try_is_not_repeated():
    flat = [Trial(setting(), 1.0)]
    while (found := next_setting(flat)) is not None:
        flat.append(Trial(found, 1.0))
    assert len(flat) == 1 + PATIENCE
    first = next_setting(flat[:1])
    second = next_setting([flat[0], Trial(first, None, runs=True)])
    assert second.text != first.text
    assert losing_streak([flat[0], Trial(first, None, runs=True)]) == 0


def test_a_sweep_leaves_choices_that_did_not_work():
    trials = [Trial(setting(), 1.0), Trial(setting(B=8), None), Trial(setting(B=2), 1.1)]
    assert next_setting(trials).current["B"] != 8
    assert next_setting([Trial(setting(), None)]) is None
    assert next_setting([]) is None


def test_a_sweep_goes_on_from_all_attempts_that_differ_in_their_tunables_alone():
    base = attempt(1, 1.0, source=FILE)
    moved = attempt(2, 1.2, source=FILE.replace("[1, 2, 4, 8]", "[4, 1, 2, 8]"))
    other = attempt(3, 9.0, source=FILE.replace("return x", "return x + 0"))
    found = sweep_of(base, [base, moved, other], [])
    assert found is not None
    assert found.current["B"] in {4, 8, 2}
    assert found.text not in {read_setting(base.source).text, read_setting(moved.source).text}
    assert sweep_of(attempt(4, 1.0, source="x = 1"), [], []) is None


def test_a_brief_without_a_search_asks_for_a_first_kernel():
    assert Brief(target("a", 0.1), "cpu", "", {}, None, None, (), "").plan.move is Move.START

"""The night: what is kept, what is taken out again, what stops it, and which target is next."""

import json
from dataclasses import replace

import pytest
from tests_support import verdict
from workspaces import drive, git, kernel, make_workspace, record, rows, start

from agent import policy, ranking
from agent.budget import Budget, Spent, amended, exhausted
from agent.errors import InputError
from agent.records import Candidate, Experiment, ExperimentState, RowStatus
from harness.records import ModelGain, ModeMeasurement, SiteCounts, Status, VerifyReport


def experiment(number, name, status, *, speedup=1.5, source="x"):
    accepted = status in {RowStatus.KEEP, RowStatus.DISCARD}
    judged = verdict(Status(status), speedup) if accepted else None
    candidate = Candidate(name, "cpp", source, "d", "p")
    return Experiment(
        number, name, ExperimentState.RECORDED, candidate, status, judged, None, "2026-11-30T20:00:00Z", None
    )


# Ranking


def test_a_target_that_was_unreliable_twice_rests_until_others_were_measured():
    def busy(number):
        one = experiment(number, "a", RowStatus.ENVIRONMENT)
        return replace(one, verdict=replace(verdict(Status.ENVIRONMENT), guard="unreliable"))

    noisy = [busy(1), busy(2)]
    assert ranking.resting(noisy[:1]) == frozenset()
    assert ranking.resting(noisy) == {"a"}
    others = [experiment(n, "b", RowStatus.DISCARD) for n in (3, 4, 5)]
    assert ranking.resting([*noisy, *others[:2]]) == {"a"}
    assert ranking.resting([*noisy, *others]) == frozenset()


# Policy


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1\n", "x = 1  # a comment\n\n"),
        ("def f(a):\n    return a\n", 'def f(a):\n    """Docs."""\n    return a\n'),
        ('"""Module."""\nx = (1)\n', "x = 1"),
    ],
)
def test_comments_layout_and_docstrings_do_not_make_a_new_kernel(one, other):
    assert policy.fingerprint(one) == policy.fingerprint(other)


@pytest.mark.parametrize(("one", "other"), [("x = 1", "x = 2"), ("f(a, b)", "f(b, a)"), ("def (", "def [")])
def test_a_changed_number_order_or_error_is_a_new_kernel(one, other):
    assert policy.fingerprint(one) != policy.fingerprint(other)


def test_a_kernel_that_was_never_judged_is_no_original():
    candidate = Candidate("a", "cpp", "x", "d", "p")
    assert policy.duplicate_of(candidate, [experiment(1, "a", RowStatus.INTERRUPTED)]) is None
    assert policy.duplicate_of(candidate, [experiment(1, "b", RowStatus.DISCARD)]) is None
    assert policy.duplicate_of(candidate, [experiment(1, "a", RowStatus.DISCARD)]).number == 1


def report(gain, *, applied=2, outputs_ok=True):
    modes = {"overnight": 1.0, "eager": 2.0, "compile": 1.5}
    return VerifyReport(
        "m", "cpu", "cpu", tuple(ModeMeasurement(n, ms, ms * 0.995, ms * 1.005, None) for n, ms in modes.items()),
        outputs_ok, 0.0, faster=True, model_speedup=1.0, model_speedup_vs_eager=1.0,
        sites=SiteCounts(applied, 0), applied={"a": applied},
        newest=None if gain is None else ModelGain(gain, gain * 0.99, gain * 1.01),
    )  # fmt: skip


def test_a_keep_that_helps_the_model_stays_and_a_slower_one_goes():
    assert policy.isolated_only("a", report(1.05)) is None
    assert policy.isolated_only("a", report(1.001)) is None
    assert "of its speed" in policy.isolated_only("a", report(0.97))


def test_a_keep_whose_effect_on_the_model_was_not_timed_goes():
    assert "could not be timed" in policy.isolated_only("a", report(None))


def test_a_kernel_never_reached_or_one_that_changes_outputs_goes():
    assert "no call site" in policy.isolated_only("a", report(1.1, applied=0))
    assert "outputs differ" in policy.isolated_only("a", report(1.1, outputs_ok=False))


# Budget


def test_each_limit_stops_and_the_last_tenth_of_the_hours_is_for_verification():
    assert exhausted(Budget(hours=1), Spent(3239, 0, 0, 0, 0.0)) is None
    assert "verification" in exhausted(Budget(hours=1), Spent(3241, 0, 0, 0, 0.0))
    assert "2 of 2 experiments" in exhausted(Budget(experiments=2), Spent(0, 2, 0, 0, 0.0))
    assert "tokens" in exhausted(Budget(tokens=5), Spent(0, 0, 5, 0, 0.0))
    assert "calls" in exhausted(Budget(calls=5), Spent(0, 0, 0, 5, 0.0))
    assert "$1.00" in exhausted(Budget(dollars=1), Spent(0, 0, 0, 0, 1.0))
    assert exhausted(Budget(dollars=1), Spent(0, 0, 0, 0, None)) is None


def test_a_plus_extends_what_was_allowed_and_a_plain_number_replaces_it():
    budget = Budget(hours=8, experiments=10)
    assert amended(budget, {"hours": "+2", "experiments": "+5"}) == Budget(hours=10, experiments=15)
    assert amended(budget, {"hours": "0.5"}) == Budget(hours=0.5, experiments=10)
    assert amended(budget, {"hours": None}) == budget
    with pytest.raises(InputError, match=r"--experiments 1\.5"):
        amended(budget, {"experiments": "1.5"})
    with pytest.raises(InputError, match="--hours soon"):
        amended(budget, {"hours": "soon"})


# The night itself, against real git, a real journal and a harness process that speaks the real protocol


def statuses(workspace):
    return [row["status"] for row in rows(workspace)]


def test_a_night_keeps_winners_and_takes_out_what_does_not_help_the_model(tmp_path):
    recordings = {
        "0001_rmsnorm_a__first.py": kernel("keep 1.5"),
        "0002_softmax_b__slower_model.py": kernel("keep 1.2", "# model: 1.2", name="b"),
        "0003_softmax_b__unreached.py": kernel("keep 1.2", "# not applied", name="c"),
        "0004_softmax_b__changes_outputs.py": kernel("keep 1.2", "# breaks the model", name="d"),
        "0005_softmax_b__tie.py": kernel("discard 1.0", name="e"),
        "0006_softmax_b__good.py": kernel("keep 1.2", "# model: 0.95", name="f"),
    }
    workspace = make_workspace(tmp_path, recordings=recordings)
    said = drive(workspace, "run")
    table = rows(workspace)
    assert [row["status"] for row in table] == ["keep", "discard", "discard", "discard", "discard", "keep"]
    assert all("isolated only" in row["description"] for row in table[1:4])
    assert (table[0]["model_ms"], table[5]["model_ms"]) == ("0.9", "0.855")
    assert table[5]["model_speedup"] == "1.16959"
    subjects = git(workspace, "log", "--format=%s", "overnight/night").splitlines()
    assert [subject.startswith("Revert") for subject in subjects].count(True) == 3
    assert "verified 1.170" in said
    assert json.loads((workspace / ".overnight/night/verify.json").read_text())["sites"]["applied"] == 4


def test_everything_of_an_experiment_is_on_disk(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__first.py": kernel()})
    drive(workspace, "run")
    folder = workspace / ".overnight/night/experiments/0001"
    assert {file.name for file in folder.iterdir()} == {
        "candidate.py", "prompt.md", "reply.md", "verdict.json", "log.txt",
    }  # fmt: skip
    import hashlib

    trailer = git(workspace, "log", "-1", "--format=%(trailers:key=Verdict,valueonly)", "overnight/night")
    assert hashlib.sha256((folder / "verdict.json").read_bytes()).hexdigest() == trailer
    assert (folder / "candidate.py").read_text() == kernel()


def test_a_repeated_kernel_costs_no_judge_time(tmp_path):
    again = {"0001_rmsnorm_a__one.py": kernel("discard 1"), "0002_rmsnorm_a__two.py": kernel("discard 1") + "# new\n"}
    workspace = make_workspace(tmp_path, recordings=again)
    drive(workspace, "run")
    assert statuses(workspace) == ["discard", "duplicate"]
    assert rows(workspace)[1]["correctness"] == "PASS"
    assert len((workspace / ".overnight/night/judged.txt").read_text().split()) == 1


def test_invalid_replies_are_numbered_and_counted(tmp_path):
    bad = {f"000{n}_rmsnorm_a__bad.py": f"INVALID REPLY: reason {n}" for n in range(1, 4)}
    workspace = make_workspace(tmp_path, recordings={**bad, "0004_rmsnorm_a__good.py": kernel()})
    drive(workspace, "run", "--experiments", "2")
    assert statuses(workspace) == ["invalid_reply", "invalid_reply"]
    drive(workspace, "resume", "--experiments", "+2")
    assert statuses(workspace) == ["invalid_reply", "invalid_reply", "invalid_reply", "keep"]


def test_a_judge_that_dies_is_started_again_once_and_then_the_row_says_environment(tmp_path):
    deadly = {"0001_rmsnorm_a__deadly.py": kernel("keep", "# dies"), "0002_softmax_b__good.py": kernel()}
    workspace = make_workspace(tmp_path, recordings=deadly)
    said = drive(workspace, "run")
    assert statuses(workspace) == ["environment", "keep"]
    assert said.count("the judge is started again") == 1
    assert "exit code 7" in rows(workspace)[0]["description"]


def test_a_machine_that_fails_three_times_stops_the_session_resumably(tmp_path):
    sick = {
        f"000{n}_{'rmsnorm_a' if n % 2 else 'softmax_b'}__x{n}.py": kernel("environment", name=str(n))
        for n in range(1, 6)
    }
    workspace = make_workspace(tmp_path, recordings=sick)
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 3")
    assert "overnight resume night" in said
    assert statuses(workspace) == ["environment"] * 3


def test_a_busy_machine_is_given_time_and_more_tries_before_the_session_stops(tmp_path):
    busy = {f"000{n}_rmsnorm_a__x{n}.py": kernel("unreliable", name=str(n)) for n in range(1, 3)}
    workspace = make_workspace(tmp_path, recordings={**busy, "0003_rmsnorm_a__calm.py": kernel()})
    process = start(workspace, "run")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "waiting" in line:
            break
    assert "too busy to measure on: waiting 10 s" in lines[-1]
    process.terminate()
    process.communicate(timeout=15)
    assert process.returncode == 0
    assert statuses(workspace) == ["environment"]


def test_one_target_that_the_machine_cannot_judge_is_parked_and_the_night_goes_on(tmp_path):
    sick = {f"000{n}_rmsnorm_a__x{n}.py": kernel("environment", name=str(n)) for n in range(1, 4)}
    workspace = make_workspace(tmp_path, recordings={**sick, "0009_softmax_b__good.py": kernel()})
    drive(workspace, "run")
    assert statuses(workspace) == ["environment", "environment", "keep"]


def test_a_target_that_cannot_be_judged_has_no_row_but_is_in_the_report(tmp_path):
    recordings = {"0001_rmsnorm_a__x.py": kernel("unjudgeable"), "0002_softmax_b__good.py": kernel()}
    workspace = make_workspace(tmp_path, recordings=recordings)
    said = drive(workspace, "run")
    assert "rmsnorm_a is set aside" in said
    assert [(row["experiment"], row["target"]) for row in rows(workspace)] == [("1", "softmax_b")]
    from agent.morning.markdown import markdown
    from agent.morning.night import read_night
    from agent.places import SessionPlaces

    assert "- rmsnorm_a: scripted unjudgeable" in markdown(read_night(SessionPlaces(workspace, "night")))


def test_a_profile_without_targets_is_nothing_to_optimise(tmp_path):
    workspace = make_workspace(tmp_path, script={"targets": {}}, recordings={"0001_*__x.py": kernel()})
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 1")
    assert "nothing to optimise" in said


def test_a_model_that_cannot_be_profiled_is_said_and_nothing_stays_behind(tmp_path):
    workspace = make_workspace(
        tmp_path, script={"targets": {}, "refuse": "Net needs --model-args width=…"}, recordings={"0001_*__x.py": "x"}
    )
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 2")
    assert "Net needs --model-args" in said
    assert not (workspace / ".overnight").exists()
    assert not (workspace / "results.tsv").exists()
    assert "overnight" not in git(workspace, "branch", "--list")


def test_a_fault_of_ours_in_the_judge_is_not_the_candidates(tmp_path):
    workspace = make_workspace(
        tmp_path, recordings={"0001_rmsnorm_a__x.py": kernel("ours"), "0002_softmax_b__y.py": kernel()}
    )
    drive(workspace, "run")
    assert statuses(workspace) == ["environment", "keep"]
    assert "our fault" in rows(workspace)[0]["description"]


def test_program_md_and_new_recordings_are_read_on_resume(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__one.py": kernel()})
    drive(workspace, "run")
    record(workspace, "0002_softmax_b__two.py", kernel("incorrect"))
    drive(workspace, "resume")
    assert statuses(workspace) == ["keep", "incorrect"]


def test_the_morning_says_which_budget_to_extend(tmp_path):
    folder = make_workspace(tmp_path / "w", recordings={"0001_rmsnorm_a__one.py": kernel()})
    assert "overnight resume night --experiments +20" in drive(folder, "run", "--experiments", "1")

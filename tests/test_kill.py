"""`kill -9` of the supervisor at any moment: nothing judged is lost, numbers go on, the tip is the best state."""

import os
import random
import shutil
import signal
import time
from contextlib import closing

import pytest
from workspaces import drive, git, kernel, make_workspace, rows, start, state_of

from agent.journal import Journal
from agent.records import RowStatus

RECORDINGS = {
    "0001_rmsnorm_a__first.py": kernel("keep 1.5", name="a"),
    "0002_softmax_b__wrong.py": kernel("incorrect", name="b"),
    "0003_softmax_b__slows_the_model.py": kernel("keep 1.2", "# model: 1.3", name="c"),
    "0004_rmsnorm_a__better.py": kernel("keep 1.3", "# model: 0.8", name="d"),
}
OUTCOMES = ["keep", "incorrect", "discard", "keep"]


@pytest.fixture
def workspace(tmp_path):
    folder = make_workspace(tmp_path / "w", recordings=RECORDINGS)
    (folder / "staged.txt").write_text("staged")
    git(folder, "add", "staged.txt")
    (folder / "model.py").write_text((folder / "model.py").read_text() + "# dirty\n")
    return folder


def kill_at(workspace, moment):
    """Start, wait until the supervisor has reached the moment, kill it there."""
    process = start(workspace, "run", "--pause-at", moment)
    for line in process.stdout:
        if line.startswith("paused at"):
            break
    else:
        pytest.fail(f"never came to {moment}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()


def judgements(workspace):
    return (workspace / ".overnight/night/judged.txt").read_text().split()


def assert_whole(workspace, before, interruptions):
    """The finished session is what an undisturbed one would be, interrupted rows aside."""
    table = rows(workspace)
    assert [row["experiment"] for row in table] == [str(number) for number in range(1, len(table) + 1)]
    assert [row["status"] for row in table if row["status"] != "interrupted"] == OUTCOMES
    assert len(table) == len(OUTCOMES) + interruptions
    for row in [row for row in table if row["status"] == "keep"]:
        path = f"kernels/library/{row['target']}.py"
        number = int(row["experiment"])
        judged = workspace / f".overnight/night/experiments/{number:04d}/candidate.py"
        assert git(workspace, "rev-parse", f"{row['commit']}:{path}") == git(
            workspace, "hash-object", "--no-filters", str(judged)
        )
    tip = git(workspace, "show", "overnight/night:kernels/library/rmsnorm_a.py")
    assert tip == RECORDINGS["0004_rmsnorm_a__better.py"].strip()
    assert "softmax_b" not in git(workspace, "ls-tree", "-r", "--name-only", "overnight/night")
    assert git(workspace / ".overnight/night/worktree", "status", "--porcelain") == ""
    assert state_of(workspace) == before


@pytest.mark.parametrize(
    ("moment", "interruptions"),
    [
        ("proposed:1", 1),
        ("judged:1", 0),
        ("committed:1", 0),
        ("decided:1", 0),
        pytest.param("recorded:1", 0, marks=pytest.mark.slow),
        pytest.param("judged:2", 0, marks=pytest.mark.slow),
        pytest.param("committed:3", 0, marks=pytest.mark.slow),
        ("taken_out:3", 0),
        pytest.param("decided:3", 0, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_step_loses_nothing_and_judges_nothing_twice(workspace, moment, interruptions):
    before = state_of(workspace)
    kill_at(workspace, moment)
    said = drive(workspace, "resume")
    assert_whole(workspace, before, interruptions)
    assert len(judgements(workspace)) == len(set(judgements(workspace))) == len(OUTCOMES)
    assert ("was left" in said) == (moment != "recorded:1")
    assert git(workspace, "log", "--format=%s", "overnight/night").count("Revert") == 1


def test_an_interrupted_candidate_is_judged_first_and_nothing_is_proposed_again(workspace):
    kill_at(workspace, "proposed:2")
    said = drive(workspace, "resume")
    assert "experiment 2 was left proposed by the run before: now interrupted" in said
    table = rows(workspace)
    assert [(row["status"], row["target"]) for row in table[1:3]] == [
        ("interrupted", "softmax_b"),
        ("incorrect", "softmax_b"),
    ]
    assert [row["description"].partition(":")[0] for row in table[1:3]] == ["wrong", "wrong"]


def test_a_row_that_was_half_written_when_the_power_went_is_written_whole(workspace):
    kill_at(workspace, "decided:2")
    with (workspace / "results.tsv").open("a") as file:
        file.write("2\tdiscard\tpointw")
    drive(workspace, "resume")
    assert [row["status"] for row in rows(workspace)] == OUTCOMES


@pytest.mark.slow
def test_two_kills_in_a_row_mark_two_experiments_and_lose_none(workspace):
    before = state_of(workspace)
    kill_at(workspace, "proposed:1")
    process = start(workspace, "resume", "--pause-at", "proposed:2")
    for line in process.stdout:
        if line.startswith("paused at"):
            break
    process.kill()
    process.wait(timeout=10)
    process.stdout.close()
    drive(workspace, "resume")
    assert_whole(workspace, before, 2)


TIMES = {"timestamp", "commit"}


def essence(workspace):
    """Rows, journal and branch without times, numbers and what was cut off: equal for equal nights."""
    table = [row for row in rows(workspace) if row["status"] != "interrupted"]
    with closing(Journal(workspace / ".overnight/night/journal.sqlite", read_only=True)) as journal:
        told = [
            (one.target, one.state, one.status, one.candidate, one.verdict, one.detail, one.model_ms, one.model_speedup)
            for one in journal.experiments()
            if one.status is not RowStatus.INTERRUPTED
        ]
    return {
        "rows": [{name: cell for name, cell in row.items() if name not in {"experiment", *TIMES}} for row in table],
        "journal": told,
        "tree": git(workspace, "rev-parse", "overnight/night^{tree}"),
        "commits": git(workspace, "log", "--format=%s", "overnight/night"),
    }


def cut_off_at_random(workspace, draw, kills, longest_s=1.6):
    """Kill a run and its resumes at random instants; returns how often one was killed before its end."""
    verb, killed = "run", 0
    while killed < kills:
        process = start(workspace, verb)
        time.sleep(draw.uniform(0.05, longest_s))
        finished = process.poll() is not None
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        if finished:
            break
        killed += 1
        verb = "resume" if has_session(workspace) else "run"
    drive(workspace, "resume" if has_session(workspace) else "run")
    return killed


def has_session(workspace):
    """Whether a kill came after the session was made; before it, whatever it left is removed as a user would."""
    journal = workspace / ".overnight/night/journal.sqlite"
    if journal.exists() and Journal(journal).note("options") is not None:
        return True
    shutil.rmtree(workspace / ".overnight", ignore_errors=True)
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workspace = make_workspace(tmp_path_factory.mktemp("undisturbed") / "w", recordings=RECORDINGS)
    drive(workspace, "run")
    return essence(workspace)


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])])
def test_kills_at_random_instants_end_in_the_same_night(tmp_path, undisturbed, kills):
    seed = int(os.environ.get("KILL_SEED", "20261201"))
    draw, done, nights = random.Random(seed), 0, 0
    while done < kills:
        nights += 1
        workspace = make_workspace(tmp_path / f"w{nights}", recordings=RECORDINGS)
        before = state_of(workspace)
        done += cut_off_at_random(workspace, draw, min(8, kills - done))
        assert essence(workspace) == undisturbed, f"KILL_SEED={seed}, night {nights}"
        numbers = [row["experiment"] for row in rows(workspace)]
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        assert state_of(workspace) == before

"""A session: its lock, its signals, what it refuses, what it repairs, and what it leaves of the user's things."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from workspaces import ENVIRONMENT, drive, git, kernel, make_workspace, record, rows, start, state_of

from agent.errors import InputError
from agent.lock import SessionLock, running
from agent.places import next_free_name, sessions
from agent.repository import session_branches

SLOW = {"0001_rmsnorm_a__slow.py": kernel("keep 1.5", "# slow: 30"), "0002_softmax_b__next.py": kernel("incorrect")}
ONE = {"0001_rmsnorm_a__one.py": kernel()}


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def judging(workspace):
    """Whether the scripted judge has been given a candidate."""
    return (workspace / ".overnight/night/judged.txt").exists()


def finish(process, seconds=15):
    said, _ = process.communicate(timeout=seconds)
    return said


# Lock


def test_a_second_supervisor_is_refused_while_the_first_one_lives(tmp_path):
    workspace = make_workspace(tmp_path, recordings=SLOW)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    said = drive(workspace, "resume", check=False)
    assert said.endswith("exit 2")
    assert f"already running (pid {process.pid})" in said
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_lock_whose_pid_now_belongs_to_another_program_is_stale(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": os.getppid(), "started": 1.0}))
    assert running(path) is None
    lock = SessionLock(path)
    assert str(os.getppid()) in lock.take()
    assert running(path).pid == os.getpid()
    lock.release()
    assert running(path) is None


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"pid": "x"}'])
def test_a_torn_lock_file_is_no_lock(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    lock = SessionLock(tmp_path / "lock")
    assert lock.take() is None
    lock.release()


def test_the_lock_of_a_living_process_is_refused_even_without_its_kernel_lock(tmp_path):
    other = psutil.Process(os.getppid())
    (tmp_path / "lock").write_text(json.dumps({"pid": other.pid, "started": other.create_time()}))
    with pytest.raises(InputError, match="already running"):
        SessionLock(tmp_path / "lock").take()


def test_a_refused_second_supervisor_harms_nothing_while_the_first_one_profiles(tmp_path):
    script = {"targets": {"rmsnorm_a": 0.5}, "slow": 4}
    workspace = make_workspace(tmp_path, script=script, recordings=ONE)
    process = start(workspace, "run")
    wait_for(lambda: (workspace / ".overnight/night/lock").exists() and running(workspace / ".overnight/night/lock"))
    assert drive(workspace, "resume", check=False).endswith("exit 2")
    assert "keep" in finish(process, 30)
    assert [row["status"] for row in rows(workspace)] == ["keep"]


def test_another_session_that_runs_here_is_said(tmp_path):
    workspace = make_workspace(tmp_path, recordings=SLOW)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    shutil.rmtree(workspace / "recordings")
    for name, source in ONE.items():
        record(workspace, name, source)
    assert "session night is running here too" in drive(workspace, "run", name="second")
    process.terminate()
    finish(process)


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_night_cleanly_within_seconds(tmp_path, number):
    workspace = make_workspace(tmp_path, recordings=SLOW)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(number)
    said = finish(process)
    assert time.monotonic() - began < 5
    assert process.returncode == 0
    assert "stopped on request" in said
    assert [row["status"] for row in rows(workspace)] == ["interrupted"]
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert git(workspace / ".overnight/night/worktree", "status", "--porcelain") == ""


def test_after_a_stop_the_stored_candidate_is_judged_before_anything_new_is_proposed(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__slow.py": kernel("keep 1.5", "# slow: 3")})
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    process.terminate()
    finish(process)
    shutil.rmtree(workspace / "recordings")
    record(workspace, "0002_softmax_b__next.py", kernel("incorrect"))
    drive(workspace, "resume")
    assert [(row["target"], row["status"]) for row in rows(workspace)] == [
        ("rmsnorm_a", "interrupted"), ("rmsnorm_a", "keep"), ("softmax_b", "incorrect"),
    ]  # fmt: skip


def test_a_detached_session_survives_its_terminal(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__slow.py": kernel("keep 1.5", "# slow: 2")})
    process = start(workspace, "run", "--detached")
    wait_for(lambda: judging(workspace))
    process.send_signal(signal.SIGHUP)
    finish(process)
    assert [row["status"] for row in rows(workspace)] == ["keep"]


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    process = start(workspace, "run", "--pause-at", "judged:1")
    for line in process.stdout:
        if line.startswith("paused"):
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(timeout=3)
    assert process.returncode == -signal.SIGINT
    process.stdout.close()
    drive(workspace, "resume")
    assert [row["status"] for row in rows(workspace)] == ["keep"]


def test_the_judge_dies_with_a_killed_supervisor(tmp_path):
    workspace = make_workspace(tmp_path, recordings=SLOW)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    process.kill()
    finish(process)
    children = [
        one for one in psutil.process_iter(["cmdline"]) if str(workspace) in " ".join(one.info["cmdline"] or [])
    ]
    assert not children


# What it refuses and repairs


def test_a_changed_model_is_refused_and_accepted_only_when_asked(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    (workspace / "model.py").write_text((workspace / "model.py").read_text() + "# changed\n")
    said = drive(workspace, "resume", check=False)
    assert said.endswith("exit 2")
    assert "--accept-change" in said


def test_another_machine_profiles_again_and_says_so(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    import sqlite3

    with sqlite3.connect(workspace / ".overnight/night/journal.sqlite") as connection:
        connection.execute(
            "UPDATE notes SET value = replace(value, '\"torch\":\"', '\"torch\":\"0.') WHERE name = 'fingerprint'"
        )
        connection.execute(
            "UPDATE notes SET value = replace(value, '\"torch\": \"', '\"torch\": \"0.') WHERE name = 'fingerprint'"
        )
    connection.close()
    said = drive(workspace, "resume")
    assert "changed since the last run: torch" in said
    assert "profiling" in said


def test_a_moved_branch_is_refused_and_a_deleted_worktree_made_again(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    shutil.rmtree(workspace / ".overnight/night/worktree")
    assert "has been made again" in drive(workspace, "resume")
    kept = git(workspace, "rev-parse", "overnight/night")
    git(workspace, "update-ref", "refs/heads/overnight/night", "main")
    said = drive(workspace, "resume", check=False)
    assert said.endswith("exit 2")
    assert f"git branch -f overnight/night {kept[:12]}" in said


def test_trouble_in_the_repository_is_said_before_anything_is_written(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    (workspace / ".git/index.lock").touch()
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 2")
    assert "index.lock" in said
    assert not (workspace / ".overnight").exists()


def test_a_foreign_results_file_is_refused_before_anything_is_written(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    (workspace / "results.tsv").write_text("a\tb\n")
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 2")
    assert not (workspace / ".overnight").exists()


def test_the_same_name_twice_is_refused_and_default_names_count_up(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    assert "overnight resume night" in drive(workspace, "run", check=False)
    drive(workspace, "run", name="night-2")
    assert sessions(workspace) == ["night", "night-2"]
    assert next_free_name(workspace, "night") == "night-3"
    assert next_free_name(workspace, "day") == "day"
    assert [row["session"] for row in rows(workspace)] == ["night", "night-2"]


def test_a_branch_left_of_a_forgotten_session_is_never_taken_for_ones_own(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    shutil.rmtree(workspace / ".overnight")
    said = drive(workspace, "run", check=False)
    assert said.endswith("exit 2")
    assert "git branch -D overnight/night" in said
    assert next_free_name(workspace, "night", session_branches(workspace)) == "night-2"


def test_commits_of_an_earlier_session_that_the_user_merged_are_not_ones_own(tmp_path):
    workspace = make_workspace(tmp_path, recordings=ONE)
    drive(workspace, "run")
    git(workspace, "merge", "-q", "overnight/night")
    drive(workspace, "run", name="second")
    first, second = rows(workspace)
    assert (first["status"], second["status"]) == ("keep", "keep")
    assert first["commit"] != second["commit"]
    assert git(workspace, "rev-parse", "overnight/second") == second["commit"]


def test_a_disk_without_space_stops_cleanly_and_can_be_resumed(tmp_path):
    large = {"0001_rmsnorm_a__one.py": kernel(), "0002_softmax_b__large.py": kernel("incorrect", "# " + "x" * 400_000)}
    workspace = make_workspace(tmp_path, recordings=large)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (300_000, 300_000))
    said = drive(workspace, "run", check=False, before=limit)
    assert said.endswith("exit 3"), said
    assert "space" in said
    assert "overnight resume night" in said
    assert [row["status"] for row in rows(workspace)] == ["keep"]
    drive(workspace, "resume")
    assert [row["status"] for row in rows(workspace)] == ["keep", "incorrect"]


def test_the_users_checkout_index_and_files_are_byte_identical_afterwards(tmp_path):
    workspace = make_workspace(tmp_path, recordings={**ONE, "0002_softmax_b__two.py": kernel("incorrect", name="2")})
    (workspace / "kernels/library").mkdir(parents=True)
    (workspace / "kernels/library/rmsnorm_a.py").write_text("the user's own\n")
    (workspace / "staged.txt").write_text("staged")
    git(workspace, "add", "staged.txt")
    before = state_of(workspace)
    drive(workspace, "run")
    assert state_of(workspace) == before
    assert git(workspace, "status", "--porcelain").splitlines() == [
        "A  staged.txt", "?? kernels/", "?? recordings/", "?? results.tsv",
    ]  # fmt: skip


def test_keys_and_tokens_do_not_reach_a_harness_process(tmp_path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]);"
        "from agent.harness_client import child_environment; print(sorted(child_environment(os.environ)))"
    )
    secrets = {"OPENAI_API_KEY": "x", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "x", "apikey": "x"}
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, root], env={**ENVIRONMENT, **secrets, "KEPT": "x"}, capture_output=True, text=True
    )
    assert "KEPT" in done.stdout
    assert not any(name in done.stdout for name in secrets)


def test_an_accepted_change_forgets_what_was_learnt_on_targets_that_are_others_now(tmp_path):
    recordings = {"0001_rmsnorm_a__one.py": kernel(), "0002_softmax_b__two.py": kernel(name="2")}
    workspace = make_workspace(tmp_path, recordings=recordings)
    drive(workspace, "run")
    script = {"targets": {"rmsnorm_a": 0.4, "softmax_b": 0.3}, "keys": {"softmax_b": "another"}}
    (workspace / "model.py").write_text(f"# {json.dumps(script)}\n")
    said = drive(workspace, "resume", "--accept-change")
    assert "changed since the last run: source" in said
    assert [row["target"] for row in rows(workspace)] == ["rmsnorm_a", "softmax_b", "softmax_b"]
    assert [row["status"] for row in rows(workspace)] == ["keep", "keep", "keep"]

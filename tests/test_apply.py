"""`overnight apply`: kept commits on a branch of the user's, with nothing of the user's touched unless asked."""

import json

import pytest
from test_cli import overnight
from workspaces import drive, git, kernel, make_workspace, state_of

KEPT = {
    "0001_rmsnorm_a__first.py": kernel("keep 1.5", name="a"),
    "0002_softmax_b__slows_the_model.py": kernel("keep 1.2", "# model: 1.3", name="b"),
    "0003_rmsnorm_a__better.py": kernel("keep 1.3", "# model: 0.8", name="c"),
}
PATH = "kernels/library/rmsnorm_a.py"


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = make_workspace(tmp_path_factory.mktemp("apply") / "w", recordings=KEPT)
    drive(folder, "run")
    return folder


@pytest.fixture
def workspace(once, tmp_path):
    """A copy of the finished session with a dirty checkout: something staged, something changed, something new."""
    folder = tmp_path / "w"
    git(once, "worktree", "prune")
    import shutil

    shutil.copytree(once, folder)
    shutil.rmtree(folder / ".overnight/night/worktree")
    git(folder, "worktree", "prune")
    (folder / "staged.txt").write_text("staged")
    git(folder, "add", "staged.txt")
    (folder / "model.py").write_text((folder / "model.py").read_text() + "# dirty\n")
    (folder / "untracked.txt").write_text("untracked")
    return folder


def refuse(workspace, *arguments, words):
    before, refs = state_of(workspace), git(workspace, "for-each-ref")
    done = overnight(workspace, "apply", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split()), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert (state_of(workspace), git(workspace, "for-each-ref")) == (before, refs)


def test_the_kept_commits_come_to_a_new_branch_and_nothing_else_changes(workspace):
    before = state_of(workspace)
    done = overnight(workspace, "apply", "--branch", "faster", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["created"], [one["experiment"] for one in said["commits"]]) == (True, [1, 3])
    assert state_of(workspace) == before
    assert git(workspace, "show", f"faster:{PATH}") == KEPT["0003_rmsnorm_a__better.py"].strip()
    assert git(workspace, "diff", "--name-only", "main", "faster") == PATH
    assert git(workspace, "log", "--format=%(trailers:key=Experiment,valueonly)", "main..faster").split() == ["3", "1"]
    assert "cherry picked from commit" in git(workspace, "log", "-1", "--format=%B", "faster")


def test_applying_again_adds_only_what_is_new(workspace):
    overnight(workspace, "apply", "--branch", "faster")
    tip = git(workspace, "rev-parse", "faster")
    done = overnight(workspace, "apply", "--branch", "faster")
    assert (done.returncode, git(workspace, "rev-parse", "faster")) == (0, tip)
    assert "already" in done.stdout
    git(workspace, "branch", "-f", "faster", "faster~1")
    assert "1 kept commits added" in overnight(workspace, "apply", "--branch", "faster").stdout


def test_without_a_branch_it_makes_one_named_after_the_session(workspace):
    assert overnight(workspace, "apply").returncode == 0
    assert git(workspace, "diff", "--name-only", "main", "night-kernels") == PATH


def test_the_branch_that_is_checked_out_moves_only_when_asked(workspace):
    refuse(workspace, "--branch", "main", words="add --checkout")
    before = state_of(workspace)
    done = overnight(workspace, "apply", "--branch", "main", "--checkout")
    assert done.returncode == 0, done.stderr
    after = state_of(workspace)
    assert (workspace / PATH).read_text() == KEPT["0003_rmsnorm_a__better.py"]
    assert {name: after[name] for name in before if name not in {"head", "index"}} == {
        name: before[name] for name in before if name not in {"head", "index"}
    }
    assert git(workspace, "status", "--porcelain", "--", "staged.txt", "model.py", "untracked.txt").split("\n") == [
        "M model.py",
        "A  staged.txt",
        "?? untracked.txt",
    ]


def test_a_file_of_the_users_that_is_not_committed_is_never_overwritten(workspace):
    (workspace / PATH).parent.mkdir(parents=True)
    (workspace / PATH).write_text("mine")
    refuse(workspace, "--branch", "main", "--checkout", words="overwrite")


@pytest.mark.parametrize("what", ["another kernel", "a file where the folder goes", "a folder where the file goes"])
def test_a_conflict_is_refused_and_nothing_moves(workspace, what):
    git(workspace, "stash", "-q")
    git(workspace, "switch", "-q", "-c", "mine")
    place = {"another kernel": PATH, "a file where the folder goes": "kernels"}.get(what, f"{PATH}/inner.txt")
    (workspace / place).parent.mkdir(parents=True, exist_ok=True)
    (workspace / place).write_text("mine")
    git(workspace, "add", place)
    git(workspace, "commit", "-q", "-m", "mine")
    git(workspace, "switch", "-q", "main")
    refuse(workspace, "--branch", "mine", words="nothing was changed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--branch", "overnight/night"], "a session's own branch"),
        (["--branch", "a..b"], "not a name that git allows"),
        (["--branch", ""], "not a name that git allows"),
        (["--branch", "-f"], "not a name that git allows"),
        (["--branch", "new", "--checkout"], "is not checked out here"),
        (["nobody"], "There is no session nobody here"),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence(workspace, arguments, words):
    refuse(workspace, *arguments, words=words)


def test_a_branch_checked_out_elsewhere_is_refused(workspace, tmp_path):
    git(workspace, "worktree", "add", "-q", "-b", "elsewhere", str(tmp_path / "elsewhere"))
    refuse(workspace, "--branch", "elsewhere", words="switch it to another branch")


def test_hooks_and_signing_do_not_change_or_stop_it_and_that_is_said(workspace):
    hook = workspace / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    git(workspace, "config", "commit.gpgSign", "true")
    done = overnight(workspace, "apply", "--branch", "faster")
    assert done.returncode == 0, done.stderr
    assert "hooks (pre-commit) and commit signing are bypassed" in done.stdout


def test_a_session_without_keeps_is_the_honest_no(tmp_path):
    folder = make_workspace(tmp_path / "w", recordings={"0001_rmsnorm_a__x.py": kernel("incorrect")})
    drive(folder, "run")
    done = overnight(folder, "apply", "--branch", "faster")
    assert (done.returncode, git(folder, "branch", "--list", "faster")) == (1, "")

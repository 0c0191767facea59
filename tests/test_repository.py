"""Git: exactly the judged bytes are committed, and the user's checkout stays byte-identical."""

import hashlib
import os
import subprocess

import psutil
import pytest
from workspaces import git, make_workspace, state_of

from agent import repository
from agent.errors import InputError
from agent.repository import KeepMessage

PATH = "kernels/triton/rmsnorm_a.py"


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "w")


@pytest.fixture
def branch(workspace):
    with repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree") as opened:
        opened.open_worktree()
        yield opened


def message(number=1):
    return KeepMessage(number, "rmsnorm_a", 1.25, "faster\nkernel", "ab" * 32)


def judged(tmp_path, data):
    file = tmp_path / "candidate.py"
    file.write_bytes(data)
    return file


def test_a_keep_is_one_commit_of_one_path_with_its_trailers(branch, workspace, tmp_path):
    commit = branch.keep(PATH, judged(tmp_path, b"x = 1\n"), message())
    assert git(workspace, "show", "--name-only", "--format=", commit) == PATH
    trailers = git(workspace, "log", "-1", "--format=%(trailers:unfold)", commit).splitlines()
    assert trailers == ["Experiment: 1", "Target: rmsnorm_a", "Speedup: 1.2500", f"Verdict: {'ab' * 32}"]
    assert git(workspace, "log", "-1", "--format=%an <%ae> %cn", commit) == "Night Owl <owl@example.org> Night Owl"
    assert branch.fate(1).commit == commit
    assert branch.fate(11) is None


@pytest.mark.parametrize("data", [b"a\r\nb\r\n", b"no newline at end", b"\xc3\xa9 $Id$\n", b"tab\t \ntrailing  \n"])
def test_line_endings_filters_and_keywords_do_not_change_what_was_judged(workspace, tmp_path, data):
    git(workspace, "config", "core.autocrlf", "true")
    git(workspace, "config", "filter.shout.clean", "tr a-z A-Z")
    git(workspace, "config", "filter.shout.smudge", "tr A-Z a-z")
    (workspace / ".gitattributes").write_text("*.py text eol=crlf ident filter=shout\n")
    git(workspace, "add", ".gitattributes")
    git(workspace, "commit", "-q", "-m", "attributes")
    with repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree") as branch:
        branch.open_worktree()
        commit = branch.keep(PATH, judged(tmp_path, data), message())
        assert branch.read(PATH) == data
        assert (branch.worktree / PATH).read_bytes() == data
    blob = subprocess.run(["git", "cat-file", "blob", f"{commit}:{PATH}"], cwd=workspace, capture_output=True).stdout
    assert hashlib.sha256(blob).digest() == hashlib.sha256(data).digest()


def test_hooks_and_signing_are_bypassed_and_announced(workspace, tmp_path):
    for hook in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-checkout"):
        file = workspace / ".git/hooks" / hook
        file.write_text("#!/bin/sh\ntouch hook-ran; exit 1\n")
        file.chmod(0o755)
    git(workspace, "config", "commit.gpgsign", "true")
    git(workspace, "config", "user.signingkey", "none")
    before = state_of(workspace)
    with repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree") as branch:
        branch.open_worktree()
        commit = branch.keep(PATH, judged(tmp_path, b"x\n"), message())
        branch.take_out(PATH, commit, "isolated only: no")
    assert not list(workspace.rglob("hook-ran"))
    assert state_of(workspace) == before
    said = repository.commit_switches(workspace)
    assert "pre-commit" in said[0]
    assert said[1] == "commit signing"


def test_a_repository_without_an_identity_gets_ours(workspace, tmp_path):
    git(workspace, "config", "--unset", "user.name")
    git(workspace, "config", "--unset", "user.email")
    environment = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(tmp_path)}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from agent import repository;"
        "branch = repository.open_branch(Path(sys.argv[2]), 'night', Path(sys.argv[2]) / '.overnight/night/worktree');"
        "branch.open_worktree(); branch.keep('kernels/cpp/t.py', Path(sys.argv[3]),"
        " repository.KeepMessage(1, 't', 1.5, 'd', 'a')); branch.close()"
    )
    root = str(repository.__file__).rsplit("/", 2)[0]
    python = subprocess.run(
        [os.sys.executable, "-c", code, root, str(workspace), str(judged(tmp_path, b"x\n"))],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
    )
    assert python.returncode == 0, python.stderr
    assert git(workspace, "log", "-1", "--format=%an <%ae>", "overnight/night") == "Overnight <overnight@localhost>"


def test_a_revert_restores_the_one_path_and_leaves_others(branch, tmp_path):
    branch.keep(PATH, judged(tmp_path, b"kept\n"), message())
    branch.write(PATH, b"tried\n")
    branch.write("kernels/cpp/other.py", b"other\n")
    branch.revert(PATH)
    assert (branch.worktree / PATH).read_bytes() == b"kept\n"
    assert (branch.worktree / "kernels/cpp/other.py").exists()
    branch.revert("kernels/cpp/other.py")
    assert not (branch.worktree / "kernels/cpp/other.py").exists()


def test_a_win_taken_out_leaves_the_file_as_it_was_before(branch, workspace, tmp_path):
    first = branch.keep(PATH, judged(tmp_path, b"one\n"), message(1))
    second = branch.keep(PATH, judged(tmp_path, b"two\n"), message(2))
    branch.take_out(PATH, second, "isolated only: slower")
    assert branch.read(PATH) == (branch.worktree / PATH).read_bytes() == b"one\n"
    assert branch.fate(2).taken_out == "isolated only: slower"
    branch.take_out(PATH, first, "isolated only: slower")
    assert branch.read(PATH) is None
    assert not (branch.worktree / PATH).exists()
    assert git(branch.worktree, "status", "--porcelain") == ""


def test_a_dirty_checkout_with_staged_and_untracked_files_stays_byte_identical(workspace, tmp_path):
    (workspace / "model.py").write_text("dirty\n")
    (workspace / "staged.py").write_text("staged\n")
    git(workspace, "add", "staged.py")
    (workspace / "untracked.py").write_text("untracked\n")
    before = state_of(workspace)
    with repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree") as branch:
        branch.open_worktree()
        repository.exclude_state(workspace)
        branch.keep(PATH, judged(tmp_path, b"x\n"), message())
    assert state_of(workspace) == before
    assert ".overnight" not in git(workspace, "status", "--porcelain")


def unfinished_merge(folder):
    git(folder, "checkout", "-q", "-b", "other")
    (folder / "model.py").write_text("other\n")
    git(folder, "commit", "-qam", "other")
    git(folder, "checkout", "-q", "main")
    (folder / "model.py").write_text("mine\n")
    git(folder, "commit", "-qam", "mine")
    subprocess.run(["git", "merge", "other"], cwd=folder, capture_output=True)


def unfinished_rebase(folder):
    unfinished_merge(folder)
    git(folder, "merge", "--abort")
    subprocess.run(["git", "rebase", "other"], cwd=folder, capture_output=True)


def stale_lock(folder):
    (folder / ".git/index.lock").touch()


def branch_in_the_way(folder):
    git(folder, "branch", "overnight")


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (unfinished_merge, "git merge --abort"),
        (unfinished_rebase, "git rebase --abort"),
        (stale_lock, "index.lock exists"),
        (branch_in_the_way, "git branch -m"),
    ],
)
def test_trouble_in_the_repository_is_said_with_its_remedy_and_nothing_is_made(workspace, trouble, words):
    trouble(workspace)
    with pytest.raises(InputError, match=words):
        repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree")
    assert not (workspace / ".overnight").exists()
    assert "overnight/night" not in git(workspace, "branch", "--list")


def test_no_repository_no_commit_and_a_bare_repository_are_said(tmp_path):
    with pytest.raises(InputError, match="git init"):
        repository.open_branch(tmp_path, "night", tmp_path / "worktree")
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(InputError, match="no commit yet"):
        repository.open_branch(tmp_path / "empty", "night", tmp_path / "worktree")
    git(tmp_path, "init", "-q", "--bare", "bare.git")
    with pytest.raises(InputError, match="bare repository"):
        repository.open_branch(tmp_path / "bare.git", "night", tmp_path / "worktree")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_repository_of_another_user_is_said_with_gits_own_remedy(workspace):
    for path in [workspace, *workspace.rglob("*")]:
        os.chown(path, 65534, 65534)
    with pytest.raises(InputError, match=r"belongs to another user.*safe\.directory"):
        repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree")


def test_a_detached_head_is_fine(workspace, tmp_path):
    git(workspace, "checkout", "-q", "--detach")
    with repository.open_branch(workspace, "night", workspace / ".overnight/night/worktree") as branch:
        branch.open_worktree()
        branch.keep(PATH, judged(tmp_path, b"x\n"), message())
    assert git(workspace, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"


def test_a_linked_worktree_of_the_user_is_a_workspace_like_any_other(workspace, tmp_path):
    git(workspace, "worktree", "add", "-q", str(tmp_path / "linked"))
    linked = tmp_path / "linked"
    assert repository.workspace_root(linked) == linked.resolve()
    with repository.open_branch(linked, "night", linked / ".overnight/night/worktree") as branch:
        branch.open_worktree()
        repository.exclude_state(linked)
        branch.keep(PATH, judged(tmp_path, b"x\n"), message())
    assert git(linked, "status", "--porcelain") == ""


def test_a_deleted_worktree_and_a_stale_lock_in_ours_are_repaired_and_said(branch, workspace, tmp_path):
    branch.keep(PATH, judged(tmp_path, b"x\n"), message())
    (workspace / ".git/worktrees/worktree/index.lock").touch()
    assert any("stale index.lock" in line for line in branch.open_worktree())
    import shutil

    shutil.rmtree(branch.worktree)
    assert any("made again" in line for line in branch.open_worktree())
    assert (branch.worktree / PATH).read_bytes() == b"x\n"


def test_a_branch_moved_by_hand_is_refused_and_a_deleted_one_brought_back(branch, workspace, tmp_path):
    kept = branch.keep(PATH, judged(tmp_path, b"x\n"), message())
    assert branch.check_tip(kept, [1]) == []
    git(workspace, "update-ref", "refs/heads/overnight/night", "main")
    with pytest.raises(InputError, match="was moved"):
        branch.check_tip(kept, [1])
    git(workspace, "update-ref", "-d", "refs/heads/overnight/night")
    assert "is back" in branch.check_tip(kept, [1])[0]
    assert branch.tip() == kept


def test_a_commit_of_somebody_else_on_our_branch_is_not_taken_for_ours(branch, workspace, tmp_path):
    kept = branch.keep(PATH, judged(tmp_path, b"x\n"), message(1))
    branch.keep(PATH, judged(tmp_path, b"y\n"), message(2))
    assert branch.check_tip(kept, [2]) == []  # a kill between the commit and the journal
    with pytest.raises(InputError, match="was moved"):
        branch.check_tip(kept, [3])


def test_our_branch_checked_out_by_the_user_is_refused(branch, workspace, tmp_path):
    branch.check_not_checked_out()
    git(workspace, "worktree", "add", "-q", "-f", str(tmp_path / "second"), "overnight/night")
    with pytest.raises(InputError, match="checked out"):
        branch.check_not_checked_out()


def test_many_commits_leave_no_processes_or_descriptors_behind(branch, tmp_path):
    me = psutil.Process()
    branch.keep(PATH, judged(tmp_path, b"0\n"), message(0))
    before = (me.num_fds(), len(me.children(recursive=True)))
    for number in range(1, 16):
        branch.keep(PATH, judged(tmp_path, f"{number}\n".encode()), message(number))
        branch.write(PATH, b"tried\n")
        branch.revert(PATH)
    assert (me.num_fds(), len(me.children(recursive=True))) == before

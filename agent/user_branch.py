"""Kept commits on a branch of the user's choosing: checkout, index and untracked files stay as they are.

A kept commit changes one path, and its bytes are those that were judged: where that path is no longer what the commit
was made on, the user decides; nothing is merged line by line and nothing is forced. Does not run the user's hooks.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InputError, MachineError
from agent.repository import BRANCH_PREFIX, git_words

NO_COMMIT = "0" * 40


@dataclass(frozen=True)
class KeptCommit:
    """One keep: its experiment, and its commit on the session's branch."""

    experiment: int
    target: str
    commit: str


@dataclass(frozen=True)
class Applied:
    """What `apply` did: the branch's new tip, which keeps it now has, and which it had before."""

    branch: str
    created: bool
    tip: str
    picked: tuple[KeptCommit, ...]
    present: tuple[KeptCommit, ...]
    checkout_updated: bool


@dataclass(frozen=True)
class Change:
    """The one path that a keep changes: blob before ("" when there was no such file) and after."""

    path: str
    before: str
    after: str


def apply_commits(root: Path, branch: str, keeps: tuple[KeptCommit, ...], *, checkout: bool = False) -> Applied:
    """Put `keeps` on top of `branch` (made at the user's HEAD when there is none); raises InputError with the remedy.

    With `checkout` the user's files follow when that branch is checked out here; git itself then refuses to overwrite
    what is not committed.
    """
    _check_name(root, branch)
    old = git_words(root, "for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}")
    here = git_words(root, "symbolic-ref", "-q", "HEAD", tolerate=True) == f"refs/heads/{branch}"
    _check_places(root, branch, here=here, checkout=checkout)
    tip, picked = _picked(root, branch, old or git_words(root, "rev-parse", "HEAD"), keeps)
    if picked or not old:
        if here:
            _fast_forward(root, branch, tip)
        else:
            git_words(root, "update-ref", "-m", "overnight apply", f"refs/heads/{branch}", tip, old or NO_COMMIT)
    present = tuple(one for one in keeps if one not in picked)
    return Applied(branch, not old, tip, picked, present, here and bool(picked))


def _check_name(root: Path, branch: str) -> None:
    if branch.startswith(BRANCH_PREFIX):
        raise InputError(f"--branch {branch} is a session's own branch: choose one of yours, or a new name.")
    try:
        checked = git_words(root, "check-ref-format", "--branch", branch)
    except MachineError as error:
        raise InputError(f"--branch {branch!r} is not a name that git allows for a branch: choose another.") from error
    if checked != branch:  # @{-1} and its like
        raise InputError(f"--branch {branch} stands for {checked}: give that name itself.")


def _check_places(root: Path, branch: str, *, here: bool, checkout: bool) -> None:
    """A branch that is checked out somewhere only moves when its files may follow."""
    if here and not checkout:
        raise InputError(
            f"{branch} is checked out here, and your files stay as they are unless you ask: add --checkout to have"
            " them follow, or choose another --branch and merge it when you like."
        )
    if checkout and not here:
        raise InputError(f"--checkout: {branch} is not checked out here: `git switch` to it first, or leave it out.")
    places = git_words(root, "worktree", "list", "--porcelain").split("\n\n")
    for place in places:
        lines = place.splitlines()
        if not here and f"branch refs/heads/{branch}" in lines and "prunable" not in place:
            where = lines[0].removeprefix("worktree ")
            raise InputError(f"{where} has {branch} checked out: switch it to another branch, or choose another.")


def _picked(root: Path, branch: str, tip: str, keeps: tuple[KeptCommit, ...]) -> tuple[str, tuple[KeptCommit, ...]]:
    """The tip with all keeps on it, and those that were not on it already; nothing is visible until it is moved."""
    picked: list[KeptCommit] = []
    with tempfile.TemporaryDirectory(prefix="overnight-apply-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git_words(root, "read-tree", tip, env=index)
        for one in _still_needed(root, tip, keeps):
            change = _change(root, one)
            _put(root, branch, one, change, tip, index)
            tip = _commit(root, one.commit, git_words(root, "write-tree", env=index), tip)
            picked.append(one)
    return tip, tuple(picked)


def _still_needed(root: Path, tip: str, keeps: tuple[KeptCommit, ...]) -> list[KeptCommit]:
    """Per path, the keeps after the one whose bytes the branch has: applying again adds only what is new."""
    by_path: dict[str, list[tuple[KeptCommit, Change]]] = {}
    for one in keeps:
        change = _change(root, one)
        by_path.setdefault(change.path, []).append((one, change))
    needed = []
    for path, mine in by_path.items():
        blob = _blob(root, tip, path)
        place = max((index for index, (_, change) in enumerate(mine) if change.after == blob), default=-1)
        needed += [one for one, _ in mine[place + 1 :]]
    return sorted(needed, key=lambda one: one.experiment)


def _change(root: Path, one: KeptCommit) -> Change:
    try:
        lines = git_words(root, "diff-tree", "-r", "--no-renames", "--no-commit-id", one.commit).splitlines()
    except MachineError as error:
        raise InputError(
            f"Experiment {one.experiment}'s commit {one.commit[:12]} is no longer in this repository:"
            " `overnight resume` brings the session's branch back if git still has it."
        ) from error
    if len(lines) != 1:
        raise InputError(f"Commit {one.commit[:12]} changes {len(lines)} paths: it is not a keep of Overnight's.")
    columns, _, path = lines[0].partition("\t")
    _, _, before, after, _ = columns.lstrip(":").split()
    return Change(path, "" if set(before) == {"0"} else before, after)


def _blob(root: Path, tree: str, path: str) -> str:
    return git_words(root, "ls-tree", "--format=%(objectname)", tree, "--", path)


def _put(root: Path, branch: str, one: KeptCommit, change: Change, tip: str, index: dict[str, str]) -> None:
    refusal = (
        f"{change.path} is another one on {branch} than experiment {one.experiment} was judged against: nothing was"
        f" changed. Take it by hand (`git show {one.commit[:12]}`), or apply to another --branch."
    )
    if _blob(root, tip, change.path) != change.before:
        raise InputError(refusal)
    try:
        git_words(root, "update-index", "--add", "--cacheinfo", f"100644,{change.after},{change.path}", env=index)
    except MachineError as error:  # a file stands where a folder is needed, or the other way round
        raise InputError(refusal) from error


def _commit(root: Path, source: str, tree: str, parent: str) -> str:
    """The same message and author on another parent, as `git cherry-pick -x` makes it."""
    name, email, date = git_words(root, "log", "-1", "--format=%an%x00%ae%x00%aI", source).split("\0")
    body = git_words(root, "log", "-1", "--format=%B", source).rstrip("\n")
    author = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email, "GIT_AUTHOR_DATE": date}
    message = f"{body}\n(cherry picked from commit {source})"
    return git_words(root, "commit-tree", tree, "-p", parent, "-m", message, env=author)


def _fast_forward(root: Path, branch: str, tip: str) -> None:
    """What `git merge --ff-only` does: the user's files follow, and git refuses to overwrite what is not committed."""
    if (Path(git_words(root, "rev-parse", "--absolute-git-dir")) / "MERGE_HEAD").exists():
        raise InputError("A merge is unfinished here: finish it, or undo it with `git merge --abort`, then apply.")
    try:
        git_words(root, "merge", "--ff-only", "--no-stat", "-q", tip)
    except MachineError as error:
        raise InputError(
            f"{branch} stays as it is: git would overwrite files of your checkout that are not committed ({error})"
        ) from error


def default_branch(session: str) -> str:
    """Where keeps go when the user names no branch: a new one beside the session's."""
    return f"{session}-kernels"

"""Git: a session's branch and worktree, through GitPython; the user's checkout and index stay as they are.

Keeps are made with plumbing (blob, tree, commit, compare-and-swap of the branch), so the committed bytes are exactly
the judged ones whatever filters, line endings, hooks or signing the user has set, and a kill leaves the old or the new
tip, never something between. Does not protect against somebody who rewrites the session's branch by hand.
"""

import os
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agent.errors import InputError, MachineError

if TYPE_CHECKING:
    from git import Repo

BRANCH_PREFIX = "overnight/"
EXCLUDED = "\n# state of Overnight\n/.overnight/\n"
FALLBACK_IDENTITY = ("Overnight", "overnight@localhost")
UNFINISHED = {
    "MERGE_HEAD": ("merge", "git merge --abort"),
    "rebase-merge": ("rebase", "git rebase --abort"),
    "rebase-apply": ("rebase", "git rebase --abort"),
    "CHERRY_PICK_HEAD": ("cherry-pick", "git cherry-pick --abort"),
    "REVERT_HEAD": ("revert", "git revert --abort"),
}
# Another git command of the user's may hold the lock for a moment; a lock older than this is a left-over.
LOCK_PATIENCE_S = 2.0
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.autocrlf=false")


@dataclass(frozen=True)
class KeepMessage:
    """What the commit of a keep says."""

    experiment: int
    target: str
    speedup: float
    description: str
    verdict_sha256: str

    def text(self) -> str:
        """Subject, empty line, trailers."""
        summary = " ".join(self.description.split()) or "kernel"
        return (
            f"{self.target}: {summary}"[:100]
            + f"\n\nExperiment: {self.experiment}\nTarget: {self.target}\nSpeedup: {self.speedup:.4f}"
            + f"\nVerdict: {self.verdict_sha256}\n"
        )


def workspace_root(folder: Path) -> Path:
    """Git's top level of `folder`, or `folder` itself outside any repository (enough for `profile` and `check`)."""
    from git import Repo
    from git.exc import InvalidGitRepositoryError

    try:
        with Repo(folder, search_parent_directories=True) as repo:
            return Path(repo.working_tree_dir).resolve() if repo.working_tree_dir else folder.resolve()
    except InvalidGitRepositoryError:
        return folder.resolve()


def checkout_root(folder: Path) -> Path:
    """Git's top level of `folder`; raises InputError with the remedy where there is no checkout."""
    from git import Repo
    from git.exc import InvalidGitRepositoryError

    try:
        with Repo(folder, search_parent_directories=True) as repo:
            if repo.working_tree_dir is None or not folder.resolve().is_relative_to(
                Path(repo.working_tree_dir).resolve()
            ):
                raise InputError(f"{folder} is not in a checkout: start in a checkout of the repository (git clone).")
            return Path(repo.working_tree_dir).resolve()
    except InvalidGitRepositoryError as error:
        raise InputError(f"{folder} is not in a git repository: run `git init`, then start again.") from error


@dataclass(frozen=True)
class Fate:
    """What became of an experiment in git; `taken_out` is the reason of its revert commit."""

    commit: str
    taken_out: str | None


class SessionBranch:
    """The branch `overnight/NAME` and its worktree; the only thing of Overnight's that writes to git."""

    def __init__(self, repo: "Repo", name: str, worktree: Path) -> None:
        self._repo = repo
        self.branch = BRANCH_PREFIX + name
        self.worktree = worktree
        self.base = ""  # where the session began: only what stands above it is the session's
        self._environment = _identity(repo)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the two git children that a Repo keeps."""
        self._repo.close()

    def open_worktree(self) -> list[str]:
        """Make branch and worktree, or repair what a kill or a user left of them; returns what was repaired."""
        notes = []
        if self.tip() is None:
            self._git("branch", "--no-track", self.branch, self.base or "HEAD")
        if not (self.worktree / ".git").exists():
            if self.worktree.exists() or self.branch in self._git("worktree", "list", "--porcelain"):
                notes.append(f"worktree of {self.branch} was missing and has been made again")
            self._git("worktree", "prune")
            self._git("worktree", "add", "--force", str(self.worktree), self.branch)
        notes += self._restore()
        return notes

    def head(self) -> str:
        """The commit that the user has checked out."""
        return self._git("rev-parse", "HEAD")

    def tip(self) -> str | None:
        """The commit at the tip of the session's branch, None before there is one."""
        found = self._git("for-each-ref", "--format=%(objectname)", f"refs/heads/{self.branch}")
        return found or None

    def write(self, path: str, data: bytes) -> None:
        """Put a candidate's file into the worktree."""
        file = self.worktree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def revert(self, path: str) -> None:
        """Restore one path to the tip: the last kept bytes, or no file. The index stands at the tip already."""
        kept = self.read(path)
        if kept is not None:
            self.write(path, kept)
        else:
            (self.worktree / path).unlink(missing_ok=True)

    def read(self, path: str) -> bytes | None:
        """The bytes of `path` at the tip, None when it has no such file."""
        blob = self._git("ls-tree", "--format=%(objectname)", self.branch, "--", path)
        if not blob:
            return None
        content: bytes = self._repo.git.cat_file("blob", blob, stdout_as_string=False, strip_newline_in_stdout=False)
        return content

    def keep(self, path: str, judged: Path, message: KeepMessage) -> str:
        """Commit the bytes of the file `judged` as `path`; returns the commit. Nothing else changes."""
        blob = self._git("hash-object", "-w", "--no-filters", "--", str(judged))
        commit = self._commit(path, blob, message.text())
        self.write(path, judged.read_bytes())
        self._reset_index()
        return commit

    def rehearse(self) -> None:
        """Commit and revert a throwaway file on a hidden ref of its own; raises MachineError where that cannot be done.

        The revert must give the very tree that was there before.
        """
        ref = f"refs/{BRANCH_PREFIX}preflight"
        base = self.head()
        with tempfile.NamedTemporaryFile(prefix="overnight-", suffix=".py") as file:
            file.write(b"def kernel_fn(x):\n    return x\n")
            file.flush()
            blob = self._git("hash-object", "-w", "--no-filters", "--", file.name)
        try:
            self._git("update-ref", ref, base)
            kept = self._commit("kernels/library/preflight.py", blob, "Rehearsal", ref=ref, tip=base)
            before = self._git("ls-tree", "--format=%(objectname)", base, "--", "kernels/library/preflight.py")
            back = self._commit("kernels/library/preflight.py", before or None, "Back again", ref=ref, tip=kept)
            trees = [self._git("rev-parse", f"{commit}^{{tree}}") for commit in (base, back)]
        finally:
            self._git("update-ref", "-d", ref, tolerate=True)
        if trees[0] != trees[1]:
            raise MachineError("git did not bring back the tree that was there before a commit and its revert.")

    def take_out(self, path: str, commit: str, reason: str) -> str:
        """A revert commit: `path` again as it was before `commit`; returns the revert's commit."""
        before = self._git("ls-tree", "--format=%(objectname)", f"{commit}^", "--", path)
        subject = self._git("log", "-1", "--format=%s", commit)
        text = f'Revert "{subject}"\n\nThis reverts commit {commit}.\n\n{reason}\n'
        reverted = self._commit(path, before or None, text)
        self.revert(path)
        self._reset_index()
        return reverted

    def fate(self, experiment: int) -> "Fate | None":
        """What git knows of an experiment: its keep commit, found by the trailer, and why it was taken out again."""
        found = self._commits(f"^Experiment: {experiment}$")
        if not found:
            return None
        reverts = self._commits(f"^This reverts commit {found[0]}", "%b")
        return Fate(found[0], reverts[-1] if reverts else None)

    def check_tip(self, expected: str | None, open_experiments: Collection[int]) -> list[str]:
        """Refuse a branch that somebody moved; bring back one that was deleted. Returns what was repaired.

        Beyond `expected` only commits of `open_experiments` may stand: a kill came between commit and journal.
        """
        tip = self.tip()
        if expected is None or tip == expected:
            return []
        if tip is None:
            self._git("update-ref", f"refs/heads/{self.branch}", expected)
            return [f"branch {self.branch} was gone and is back at {expected[:12]}"]
        ours = {keep for number in open_experiments for keep in self._commits(f"^Experiment: {number}$")}
        reverts = {revert for keep in ours for revert in self._commits(f"^This reverts commit {keep}")}
        beyond = set(self._git("rev-list", f"{expected}..{tip}").split())
        if self._git("merge-base", expected, tip) == expected and beyond <= ours | reverts:
            return []
        raise InputError(
            f"Branch {self.branch} was moved from {expected[:12]} to {tip[:12]}: put it back with"
            f" `git branch -f {self.branch} {expected[:12]}`, or start a new session."
        )

    def check_not_checked_out(self) -> None:
        """Refuse to move a branch that somebody has checked out elsewhere; raises InputError."""
        places = self._git("worktree", "list", "--porcelain").split("\n\n")
        for place in places:
            lines = place.splitlines()
            elsewhere = lines and Path(lines[0].removeprefix("worktree ")).resolve() != self.worktree.resolve()
            if elsewhere and f"branch refs/heads/{self.branch}" in lines and "prunable" not in place:
                where = lines[0].removeprefix("worktree ")
                raise InputError(f"{where} has {self.branch} checked out: switch it to another branch first.")

    def _commits(self, words: str, form: str = "%H") -> list[str]:
        """The session's own commits whose message has a line like `words`, the latest first, a line each."""
        span = f"{self.base}..{self.branch}" if self.base else self.branch
        return [line for line in self._git("log", f"--format={form}", f"--grep={words}", span).splitlines() if line]

    def _commit(self, path: str, blob: str | None, message: str, *, ref: str = "", tip: str | None = None) -> str:
        tip = tip or self.tip()
        assert tip is not None
        index = self.worktree.parent / f"index-{os.getpid()}"
        try:
            scratch = {"GIT_INDEX_FILE": str(index)}
            self._git("read-tree", tip, env=scratch)
            if blob:
                self._git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=scratch)
            else:
                self._git("update-index", "--force-remove", path, env=scratch)
            tree = self._git("write-tree", env=scratch)
        finally:
            index.unlink(missing_ok=True)
        commit = self._git("commit-tree", tree, "-p", tip, "-m", message.rstrip("\n"))
        self._git("update-ref", "-m", "overnight", ref or f"refs/heads/{self.branch}", commit, tip)
        return commit

    def _restore(self) -> list[str]:
        """Bring the worktree's kernels back to the tip and drop a lock that only a kill can have left."""
        notes = []
        lock = Path(self._git("rev-parse", "--git-path", "index.lock", at_worktree=True))
        if (lock if lock.is_absolute() else self.worktree / lock).exists():
            (lock if lock.is_absolute() else self.worktree / lock).unlink()
            notes.append("a stale index.lock of the session's worktree was removed")
        self._reset_index()
        changed = self._git("status", "--porcelain", "--untracked-files=all", "--", "kernels", at_worktree=True)
        for line in changed.splitlines():
            path = line[3:].strip('"')
            self.revert(path)
            notes.append(f"{path} was restored to the best verified state")
        return notes

    def _reset_index(self) -> None:
        self._git("read-tree", self.branch, at_worktree=True)
        self._git("update-index", "-q", "--refresh", at_worktree=True, tolerate=True)

    def _git(
        self, *arguments: str, env: Mapping[str, str] | None = None, at_worktree: bool = False, tolerate: bool = False
    ) -> str:
        """Run git once with hooks, signing and optional locks off; raises MachineError with git's own words."""
        from git import Git

        git = Git(self.worktree) if at_worktree else self._repo.git
        return _run(git, self._environment, *arguments, env=env, tolerate=tolerate)


def _run(git: Any, identity: Mapping[str, str], *arguments: str, env: Mapping[str, str] | None, tolerate: bool) -> str:
    from git.exc import GitCommandError

    try:
        return str(
            git.execute(
                ["git", *QUIET, *arguments],
                env={**identity, **(env or {})},
                with_exceptions=not tolerate,
            )
        )
    except GitCommandError as error:
        raise MachineError(f"git {arguments[0]} failed: {_words(error)}") from error


def open_branch(folder: Path, name: str, worktree: Path) -> SessionBranch:
    """Check that a session can commit here, before any work is done; raises InputError with the remedy."""
    from git import Repo
    from git.exc import GitCommandError, InvalidGitRepositoryError, NoSuchPathError

    try:
        repo = Repo(folder, search_parent_directories=True)
    except (InvalidGitRepositoryError, NoSuchPathError) as error:
        raise InputError(
            f"{folder} is not in a git repository: run `git init` and make a first commit, then start again."
        ) from error
    try:
        _check(repo)
        return SessionBranch(repo, name, worktree)
    except GitCommandError as error:
        repo.close()
        words = _words(error)
        remedy = "" if "safe.directory" not in words else " (the folder belongs to another user)"
        raise InputError(f"git refuses this repository{remedy}: {words}") from error
    except InputError:
        repo.close()
        raise


def git_words(folder: Path, *arguments: str, env: Mapping[str, str] | None = None, tolerate: bool = False) -> str:
    """What one git command prints, run in `folder` as for a session; raises MachineError with git's own words."""
    from git import Repo

    with Repo(folder, search_parent_directories=True) as repo:
        return _run(repo.git, _identity(repo), *arguments, env=env, tolerate=tolerate)


def session_branches(folder: Path) -> set[str]:
    """Names of the sessions that have a branch, whether their folder still exists or not."""
    from git import Repo
    from git.exc import InvalidGitRepositoryError

    try:
        with Repo(folder, search_parent_directories=True) as repo:
            names = {head.name for head in repo.heads}
    except InvalidGitRepositoryError:
        return set()
    return {name.removeprefix(BRANCH_PREFIX) for name in names if name.startswith(BRANCH_PREFIX)}


def exclude_state(folder: Path, *, excluded: bool = True) -> None:
    """Keep `.overnight/` out of the user's `git status` without touching a tracked file; or no longer keep it out."""
    from git import Repo

    with Repo(folder, search_parent_directories=True) as repo:
        exclude = Path(repo.common_dir) / "info" / "exclude"
        text = exclude.read_text(encoding="utf-8") if exclude.exists() else ""
        if excluded == (EXCLUDED in text):
            return
        exclude.parent.mkdir(exist_ok=True)
        exclude.write_text(text + EXCLUDED if excluded else text.replace(EXCLUDED, ""), encoding="utf-8")


def commit_switches(folder: Path) -> list[str]:
    """What of the user's set-up is bypassed on the session's branch, to be announced."""
    from git import Repo

    with Repo(folder, search_parent_directories=True) as repo:
        reader = repo.config_reader()
        hooks = Path(str(reader.get_value("core", "hooksPath", str(Path(repo.common_dir) / "hooks"))))
        active = [
            hook.name for hook in hooks.glob("*") if not hook.name.endswith(".sample") and os.access(hook, os.X_OK)
        ]
        signing = str(reader.get_value("commit", "gpgsign", "false")).lower() in {"true", "1", "yes", "on"}
    return [f"hooks ({', '.join(sorted(active))})"] * bool(active) + ["commit signing"] * signing


def _check(repo: "Repo") -> None:
    repo.git.rev_parse("--git-dir")  # fails with git's own words where git will not work for us ("dubious ownership")
    if repo.bare:
        raise InputError(f"{repo.git_dir} is a bare repository: start in a checkout of it (git clone).")
    if not repo.head.is_valid():
        raise InputError("The repository has no commit yet: make one (git add … && git commit), then start again.")
    if any(head.name == BRANCH_PREFIX.rstrip("/") for head in repo.heads):
        raise InputError("A branch named `overnight` is in the way of overnight/NAME: rename it (git branch -m …).")
    git_dir = Path(repo.git_dir)
    for marker, (what, remedy) in UNFINISHED.items():
        if (git_dir / marker).exists():
            raise InputError(f"A {what} is unfinished here: finish it, or undo it with `{remedy}`, then start again.")
    lock = git_dir / "index.lock"
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while lock.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if lock.exists():
        raise InputError(
            f"{lock} exists: another git command is running, or one died; if none is running, delete that file."
        )


def _identity(repo: "Repo") -> dict[str, str]:
    """Author and committer are always passed: git's own guess is root@host."""
    reader = repo.config_reader()
    name = str(reader.get_value("user", "name", "")) or FALLBACK_IDENTITY[0]
    email = str(reader.get_value("user", "email", "")) or FALLBACK_IDENTITY[1]
    return {
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": email,
        "GIT_COMMITTER_NAME": name,
        "GIT_COMMITTER_EMAIL": email,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def _words(error: Any) -> str:
    text = str(getattr(error, "stderr", "") or error)
    return " ".join(text.replace("stderr:", "").split()).strip("' ")

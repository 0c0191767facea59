"""Where a workspace keeps its sessions, and which session is meant."""

import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InputError
from harness import wire
from harness.records import NAMED_OPS, ProfileReport

STATE_FOLDER = ".overnight"


@dataclass(frozen=True)
class SessionPlaces:
    """The files of one session, below `.overnight/NAME/`."""

    root: Path  # the workspace
    name: str

    @property
    def folder(self) -> Path:
        """Everything of the session."""
        return self.root / STATE_FOLDER / self.name

    @property
    def journal(self) -> Path:
        """The truth."""
        return self.folder / "journal.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the running supervisor."""
        return self.folder / "lock"

    @property
    def worktree(self) -> Path:
        """The checkout of `overnight/NAME`."""
        return self.folder / "worktree"

    @property
    def profile(self) -> Path:
        """The ranking that the session works on."""
        return self.folder / "profile.json"

    @property
    def profile_before(self) -> Path:
        """The ranking before the model or the machine changed."""
        return self.folder / "profile-before.json"

    @property
    def verified(self) -> Path:
        """The model with what is kept, as measured last in all modes."""
        return self.folder / "verify.json"

    @property
    def timeline(self) -> Path:
        """What the session said of itself, with the time."""
        return self.folder / "timeline.txt"

    @property
    def log(self) -> Path:
        """What harness processes and a detached session print."""
        return self.folder / "log.txt"

    @property
    def results(self) -> Path:
        """The morning file, in the user's checkout."""
        return self.root / "results.tsv"

    def target_file(self, target: str) -> Path:
        """The record of one target."""
        return self.folder / "targets" / f"{target}.json"

    def experiment(self, number: int) -> Path:
        """The folder of one experiment."""
        return self.folder / "experiments" / f"{number:04d}"

    def read_profile(self) -> ProfileReport | None:
        """The stored profile, None before the first one was finished."""
        return _profile(self.profile)

    def read_profile_before(self) -> ProfileReport | None:
        """The profile before the last change, None when there was none."""
        return _profile(self.profile_before)


def _profile(path: Path) -> ProfileReport | None:
    try:
        return wire.from_json(ProfileReport, path.read_bytes())
    except FileNotFoundError:
        return None


def sessions(root: Path) -> list[str]:
    """Names of the workspace's sessions, the latest last."""
    found = ((_modified(path), path) for path in (root / STATE_FOLDER).glob("*/journal.sqlite"))
    there = sorted((modified, path) for modified, path in found if modified is not None)
    return [path.parent.name for _, path in there]


def _modified(path: Path) -> float | None:
    """None for what vanished meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def find_session(root: Path, name: str | None) -> SessionPlaces:
    """The named session or the latest one; raises InputError naming those there are."""
    known = sessions(root)
    if not known:
        raise InputError(f"There is no session in {root}: start one with `overnight run MODEL`.")
    if name is not None and name not in known:
        raise InputError(f"There is no session {name} here: there is {', '.join(known)}.")
    return SessionPlaces(root, name or known[-1])


def find_target(root: Path, target: str, session: str | None) -> str:
    """What the judge is given for `--target`: a named op as it is, a session's target as the path of its record.

    A KernelBench file is its own path.
    """
    if target in NAMED_OPS and session is None:
        return target
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise InputError(f"--target {target}: there is no such file; give a KernelBench problem file.")
        return str(Path(target).resolve())
    known = sessions(root)
    if known or session is not None:
        places = find_session(root, session)
        if places.target_file(target).is_file():
            return str(places.target_file(target))
        if target in NAMED_OPS:
            return target
        ids = sorted(path.stem for path in (places.folder / "targets").glob("*.json"))
        raise InputError(
            f"--target {target} is neither a named op ({', '.join(NAMED_OPS)}) nor a target of session {places.name}"
            f" ({', '.join(ids) or 'which has none yet'})."
        )
    raise InputError(f"--target {target} is not a named op ({', '.join(NAMED_OPS)}), and there is no session here.")


def next_free_name(root: Path, wanted: str, branches: AbstractSet[str] = frozenset()) -> str:
    """`wanted`, or with -2, -3, ... when a session or a session's branch of that name exists."""
    taken = {path.name for path in (root / STATE_FOLDER).glob("*")} | branches
    names = [wanted, *(f"{wanted}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a kill leaves the old or the new one, never half."""
    import os

    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def pretty(data: object) -> str:
    """JSON as printed by every `--json`."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)

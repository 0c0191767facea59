"""Recorded candidates in the order of their names: `replay:DIR`, for demonstrations, tests and repeating a night.

A file is called `NNNN_TARGET__DESCRIPTION.py`; TARGET is a target's id, or `*` (also written `any`) for every target in
turn. Two comment lines at its top, both optional, say what the name cannot: `# target: ID` (wins over the name) and
`# backend: triton|cuda|cpp|library`. Without the latter the backend is read off the source. A file whose text is
`INVALID REPLY: reason` replays a reply that was no kernel. What was tried before is known from the journal (`tactic` is
the file's name), so a resumed session goes on where it was.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InputError
from agent.proposers.replies import backend_of
from agent.records import Brief, Candidate, Experiment, InvalidReply, NothingLeft, Proposal
from harness.records import BACKENDS, Target

NAME = re.compile(r"(?P<number>\d+)_(?P<target>[a-z0-9_]+?|\*)(?:__(?P<description>.*))?\.py")
HEADER = re.compile(r"^#\s*(target|backend):\s*(\S+)\s*$", re.MULTILINE)
EVERY_TARGET = {"*", "any"}
INVALID = "INVALID REPLY:"


@dataclass(frozen=True)
class Recording:
    """One recorded candidate."""

    file: str
    target: str
    backend: str
    description: str
    source: str

    def is_for(self, target_id: str) -> bool:
        """Whether it is meant for that target."""
        return self.target in EVERY_TARGET or self.target == target_id


class Replay:
    """Plays a folder of recordings. It orders targets itself (agent.proposers.base.Ordered)."""

    name = "replay"

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"--proposer replay:{folder}: there is no such folder.")
        self._recordings = tuple(read_recording(path) for path in sorted(folder.glob("*.py")))
        if not self._recordings:
            raise InputError(f"--proposer replay:{folder}: the folder holds no NNNN_TARGET__DESCRIPTION.py file.")

    def next_target(self, targets: Sequence[Target], experiments: Sequence[Experiment]) -> Target | None:
        """The target of the first recording that was not played yet."""
        played = {(one.target, _played(one)) for one in experiments}
        for recording in self._recordings:
            for target in targets:
                if recording.is_for(target.id) and (target.id, recording.file) not in played:
                    return target
        return None

    def propose(self, brief: Brief) -> Proposal:
        """The first recording for the target that is not among its attempts."""
        played = {attempt.tactic or attempt.description.partition(":")[0] for attempt in brief.attempts}
        played |= {candidate.tactic for candidate in brief.in_flight}
        for recording in self._recordings:
            if recording.is_for(brief.target.id) and recording.file not in played:
                return _proposal(recording, brief.target.id)
        return NothingLeft(brief.target.id, "no recording is left for it")


def read_recording(path: Path) -> Recording:
    """Parse a file's name and header; raises InputError naming the file."""
    match = NAME.fullmatch(path.name)
    if not match:
        raise InputError(f"{path} must be called NNNN_TARGET__DESCRIPTION.py.")
    try:
        source = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}): save it as UTF-8, or take it out.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read as a file ({error.strerror}): take it out.") from error
    header = dict(HEADER.findall("\n".join(source.splitlines()[:10])))
    backend = header.get("backend") or backend_of(source)
    if backend not in BACKENDS:
        raise InputError(f"{path}: unknown backend {backend}; one of {', '.join(BACKENDS)}.")
    description = (match["description"] or path.stem).replace("_", " ")
    return Recording(path.name, header.get("target") or match["target"], backend, description, source)


def _proposal(recording: Recording, target: str) -> Proposal:
    if recording.source.lstrip().startswith(INVALID):
        reason = recording.source.strip().removeprefix(INVALID).strip()
        return InvalidReply(target, Replay.name, f"{recording.file}: {reason}", reply=recording.source)
    return Candidate(
        target=target,
        backend=recording.backend,
        source=recording.source,
        description=recording.description,
        proposer=Replay.name,
        tactic=recording.file,
        reply=recording.source,
    )


def _played(one: Experiment) -> str:
    """The recording's file name; an invalid reply has no tactic and carries it at the start of its reason."""
    return one.candidate.tactic if one.candidate else one.detail.partition(":")[0]

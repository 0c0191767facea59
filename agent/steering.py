"""What a user asks of a session from outside, running or not: pause, stop, skip, pin, and kernels of their own to try.

Small files below `.overnight/NAME/`, each written whole; the session looks at them between two experiments. Does not
protect against somebody who edits them by hand: a file that does not parse counts as absent.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.places import SessionPlaces, write_whole
from agent.records import Candidate
from harness import wire

PROPOSER = "try"


@dataclass(frozen=True)
class Steering:
    """What holds until it is taken back. `pinned` is the only target to work on."""

    paused: bool = False
    stopping: bool = False
    skipped: tuple[str, ...] = ()
    pinned: str | None = None

    def closed(self, targets: tuple[str, ...]) -> frozenset[str]:
        """Targets that the user does not want worked on."""
        others = {one for one in targets if self.pinned in targets and one != self.pinned}
        return frozenset({*self.skipped, *others})


def steering(places: SessionPlaces) -> Steering:
    """What is asked now."""
    try:
        return wire.from_json(Steering, _file(places).read_bytes())
    except (FileNotFoundError, ValueError):
        return Steering()


def steer(places: SessionPlaces, change: Callable[[Steering], Steering]) -> Steering:
    """Ask for something else; two commands at once do not lose each other's wish."""
    with _alone(places):
        before = steering(places)
        after = change(before)
        if after != before:
            write_whole(_file(places), wire.to_json(after))
        return after


def _file(places: SessionPlaces) -> Path:
    return places.folder / "steering.json"


@contextmanager
def _alone(places: SessionPlaces) -> Iterator[None]:
    folder = os.open(places.folder, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# Kernels to try, in order


def hand_in(places: SessionPlaces, target: str, backend: str, source: str, description: str) -> str:
    """Queue a kernel of the user's; returns its name, which the experiment carries as its tactic."""
    with _alone(places):
        folder = _tries(places)
        folder.mkdir(exist_ok=True)
        counter = folder / "last"
        number = int(counter.read_text(encoding="utf-8")) + 1 if counter.exists() else 1
        write_whole(counter, str(number))
        name = f"{PROPOSER}:{number:04d}"
        write_whole(
            folder / f"{number:04d}.json",
            wire.to_json(Candidate(target, backend, source, description, PROPOSER, tactic=name)),
        )
    return name


def waiting(places: SessionPlaces) -> list[Candidate]:
    """Kernels that were handed in and not taken yet, the oldest first."""
    return [candidate for path in sorted(_tries(places).glob("*.json")) if (candidate := _read(path))]


def taken(places: SessionPlaces, candidate: Candidate) -> None:
    """Forget a handed-in kernel: the journal has it now."""
    if candidate.proposer == PROPOSER:
        (_tries(places) / f"{candidate.tactic.partition(':')[2]}.json").unlink(missing_ok=True)


def _tries(places: SessionPlaces) -> Path:
    return places.folder / "tries"


def _read(path: Path) -> Candidate | None:
    try:
        return wire.from_json(Candidate, path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None

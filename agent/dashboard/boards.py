"""Over several sessions: the fastest accepted kernels by target and device, a search, a comparison. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.morning.diff import DiffLine, counts, diff_lines
from agent.morning.night import Night, Trial
from harness.records import Target

MAX_ROWS = 20
MAX_HITS = 200


@dataclass(frozen=True)
class Entry:
    """One kernel of one session."""

    session: str
    trial: Trial
    lineage: tuple[Trial, ...]

    @property
    def kernel_us(self) -> float:
        """Its time per call."""
        return self.trial.timing.candidate_us if self.trial.timing else float("inf")


@dataclass(frozen=True)
class Board:
    """The accepted kernels of one target on one device, the fastest first."""

    target: str
    title: str
    kind: str
    device: str
    floor_us: float
    entries: tuple[Entry, ...]
    left_out: int


def boards(nights: Sequence[Night]) -> tuple[Board, ...]:
    """One board for each target and device; targets of the same name that are different regions stay apart."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    heads: dict[tuple[str, str, str], Target] = {}
    for night in nights:
        known = {one.id: one for one in night.targets}
        for trial in night.trials:
            region = known.get(trial.target)
            if (
                region is None
                or trial.timing is None
                or not _accepted(trial)
                or trial not in night.of_target(region.id)
            ):
                continue
            assert night.profile is not None
            place = (region.id, night.profile.device_name, region.key)
            found.setdefault(place, []).append(Entry(night.name, trial, night.lineage(trial)))
            heads[place] = region
    return tuple(_board(place[1], heads[place], entries) for place, entries in sorted(found.items()))


def _board(device: str, region: Target, entries: list[Entry]) -> Board:
    ranked = sorted(entries, key=lambda entry: entry.kernel_us)
    return Board(
        target=region.id,
        title=region.title,
        kind=region.kind,
        device=device,
        floor_us=region.floor_us,
        entries=tuple(ranked[:MAX_ROWS]),
        left_out=max(0, len(ranked) - MAX_ROWS),
    )


def _accepted(trial: Trial) -> bool:
    verdict = trial.experiment.verdict
    return verdict is not None and verdict.accepted and trial.timing is not None and bool(trial.source)


@dataclass(frozen=True)
class Hit:
    """One experiment that a search found, and the line in which."""

    session: str
    trial: Trial
    line: str


def search(nights: Sequence[Night], query: str) -> tuple[tuple[Hit, ...], int]:
    """Experiments in which every word of the query occurs, the latest first; and how many there are in all."""
    words = query.lower().split()
    if not words:
        return (), 0
    hits = [
        Hit(night.name, trial, _line(text, words))
        for night in nights
        for trial in reversed(night.trials)
        if all(word in (text := _text(trial)).lower() for word in words)
    ]
    return tuple(hits[:MAX_HITS]), len(hits)


def _text(trial: Trial) -> str:
    head = f"{trial.status} {trial.target} {trial.proposer} {trial.description}\n{trial.reason}"
    return f"{head}\n{trial.source}"


def _line(text: str, words: Sequence[str]) -> str:
    lines = text.split("\n")
    return max(lines, key=lambda line: sum(word in line.lower() for word in words)).strip()


@dataclass(frozen=True)
class Comparison:
    """Two experiments side by side; a ratio above 1 says that the second is faster."""

    first: Entry
    second: Entry
    diff: tuple[DiffLine, ...]
    added: int
    removed: int
    ratio: float | None
    how: str  # how the ratio was come by, and what speaks against it


def compare(first_night: Night, first: Trial, second_night: Night, second: Trial) -> Comparison:
    """What differs in their code and in their times."""
    lines = diff_lines(first.source, second.source)
    ratio, how = _ratio(first_night, first, second_night, second)
    return Comparison(
        first=Entry(first_night.name, first, first_night.lineage(first)),
        second=Entry(second_night.name, second, second_night.lineage(second)),
        diff=lines,
        added=counts(lines)[0],
        removed=counts(lines)[1],
        ratio=ratio,
        how=how,
    )


def _ratio(first_night: Night, first: Trial, second_night: Night, second: Trial) -> tuple[float | None, str]:
    """The best evidence there is: a race against each other, against the same kernel, or two separate times."""
    one, other = first.timing, second.timing
    if first.target != second.target:
        return None, "They are for different targets."
    if one is None or other is None:
        return None, "They were not both timed."
    if first_night.name == second_night.name:
        if second.rival == first.number:
            return other.speedup_vs_best, "They were timed in turns on one device."
        if first.rival == second.number:
            return 1 / one.speedup_vs_best, "They were timed in turns on one device."
        if first.rival == second.rival:
            return other.speedup_vs_best / one.speedup_vs_best, "Each was timed in turns with the same kernel."
    devices = {night.profile.device_name if night.profile else "" for night in (first_night, second_night)}
    where = "on different devices" if len(devices) > 1 else "at different moments"
    return one.candidate_us / other.candidate_us, f"With caution: they were timed {where}."

"""One experiment as a page shows it: diff, texts, timing, stages; and which texts fit into a page. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.morning.charts import Strip, strip
from agent.morning.diff import DiffLine, counts, diff_lines
from agent.morning.night import Night, Trial
from agent.visible import excerpt

MAX_TEXT = 60_000  # characters of one text
PAGE_TEXT = 12_000_000  # characters of all texts of one page: what a browser opens without waiting


@dataclass(frozen=True)
class StageLine:
    """One stage of the verdict."""

    name: str
    status: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class Card:
    """Everything a reader wants to know about one experiment."""

    trial: Trial
    diff: tuple[DiffLine, ...]
    added: int
    removed: int
    source: str
    prompt: str
    reply: str
    strip: Strip | None
    stages: tuple[StageLine, ...]
    lineage: tuple[Trial, ...]
    folder: str
    left_out: bool = False


def card(night: Night, trial: Trial, *, with_texts: bool = True) -> Card:
    """The card of one experiment; without its texts it only says where they are."""
    parent = night.trial(trial.parent) if trial.parent is not None else None
    lines = diff_lines(parent.source, trial.source) if parent and trial.source and with_texts else ()
    added, removed = counts(lines)
    return Card(
        trial=trial,
        diff=lines,
        added=added,
        removed=removed,
        source=excerpt(trial.source, MAX_TEXT) if with_texts else "",
        prompt=excerpt(trial.prompt, MAX_TEXT) if with_texts else "",
        reply=excerpt(trial.reply, MAX_TEXT) if with_texts else "",
        strip=strip(trial.timing),
        stages=_stages(trial),
        lineage=night.lineage(trial),
        folder=f".overnight/{night.name}/experiments/{trial.number:04d}",
        left_out=not with_texts,
    )


def cards(night: Night, room: int = PAGE_TEXT) -> tuple[Card, ...]:
    """All cards in order; when the texts do not fit, kept and then recent experiments keep theirs."""
    with_texts = fitting(night.trials, room)
    return tuple(card(night, one, with_texts=one.number in with_texts) for one in night.trials)


def fitting(trials: Iterable[Trial], room: int) -> frozenset[int]:
    """The numbers of those whose texts fit into the room."""
    chosen = set()
    for one in sorted(trials, key=lambda trial: (not trial.kept, -trial.number)):
        room -= sum(min(len(text), MAX_TEXT) for text in (one.source, one.source, one.prompt, one.reply))
        if room < 0:
            break
        chosen.add(one.number)
    return frozenset(chosen)


def _stages(trial: Trial) -> tuple[StageLine, ...]:
    verdict = trial.experiment.verdict
    stages = verdict.stages if verdict else {}
    return tuple(StageLine(str(name), str(one.status), one.seconds, one.detail) for name, one in stages.items())

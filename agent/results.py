"""results.tsv, the morning file: 25 columns, one line per experiment, remade from the journals at any time.

The first ten columns are AutoKernel's, in its order, so that its users' scripts read ours. A row that was never judged
(invalid reply, interrupted, environment) has correctness FAIL: not shown to be right; `status` says what it really was.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from agent.errors import InputError
from agent.records import Experiment, InvalidReply, RowStatus, Usage
from harness.records import Timing

INTEGERS = {"experiment", "tokens"}
NUMBERS = {
    "throughput_tflops",
    "latency_us",
    "pct_peak",
    "speedup_vs_pytorch",
    "peak_vram_mb",
    "speedup_vs_best",
    "ci_low",
    "ci_high",
    "model_ms",
    "model_speedup",
    "cost_usd",
}
CORRECTNESS = {
    RowStatus.KEEP: "PASS",
    RowStatus.DISCARD: "PASS",
    RowStatus.CRASH: "CRASH",
    RowStatus.TIMEOUT: "TIMEOUT",
}
FORMULA_STARTS = ("=", "+", "-", "@")


@dataclass(frozen=True)
class Row:
    """One line, as text, in the order of the columns."""

    experiment: str
    tag: str
    kernel_type: str
    throughput_tflops: str
    latency_us: str
    pct_peak: str
    speedup_vs_pytorch: str
    correctness: str
    peak_vram_mb: str
    description: str
    status: str
    speedup_vs_best: str
    ci_low: str
    ci_high: str
    failed_stage: str
    model_ms: str
    model_speedup: str
    proposer: str
    tokens: str
    cost_usd: str
    commit: str
    session: str
    target: str
    device: str
    timestamp: str

    def line(self) -> str:
        """The row as it stands in the file, without its newline."""
        return "\t".join(escape(getattr(self, field.name)) for field in fields(self))

    @property
    def key(self) -> tuple[str, str]:
        """What no two rows share."""
        return (self.session, self.experiment)


COLUMNS = tuple(field.name for field in fields(Row))
HEADER = "\t".join(COLUMNS)


def row_of(
    experiment: Experiment,
    *,
    session: str,
    kernel_type: str,
    device: str,
    invalid: InvalidReply | None = None,
    original: RowStatus | None = None,
) -> Row:
    """The row of a decided experiment; a duplicate is as correct as its `original` was."""
    assert experiment.status is not None
    verdict, candidate = experiment.verdict, experiment.candidate
    timing = verdict.timing if verdict else None
    source = candidate or invalid
    usage = source.usage if source else Usage()
    return Row(
        experiment=str(experiment.number),
        tag="keep" if experiment.status is RowStatus.KEEP else "discard",
        kernel_type=kernel_type,
        **_timing_columns(timing),
        correctness=CORRECTNESS.get(original or experiment.status, "FAIL"),
        description=_description(experiment),
        status=experiment.status,
        failed_stage=verdict.stage or "" if verdict else "",
        model_ms=_figure(experiment.model_ms),
        model_speedup=_figure(experiment.model_speedup),
        proposer=source.proposer if source else "",
        tokens=str(usage.tokens),
        cost_usd=_figure(usage.cost_usd),
        commit=experiment.commit or "",
        session=session,
        target=experiment.target,
        device=verdict.device if verdict else device,
        timestamp=experiment.finished_at or experiment.started_at,
    )


def _timing_columns(timing: Timing | None) -> dict[str, str]:
    if timing is None:
        names = "throughput_tflops latency_us pct_peak speedup_vs_pytorch peak_vram_mb speedup_vs_best ci_low ci_high"
        return dict.fromkeys(names.split(), "")
    return {
        "throughput_tflops": _figure(timing.throughput_tflops),
        "latency_us": _figure(timing.candidate_us),
        "pct_peak": _figure(timing.pct_peak),
        "speedup_vs_pytorch": _figure(timing.speedup_vs_pytorch),
        "peak_vram_mb": _figure(timing.peak_memory_mb),
        "speedup_vs_best": _figure(timing.speedup_vs_best),
        "ci_low": _figure(timing.ci_low),
        "ci_high": _figure(timing.ci_high),
    }


def _description(experiment: Experiment) -> str:
    words = [experiment.candidate.description] if experiment.candidate else []
    if experiment.detail:
        words.append(experiment.detail)
    elif experiment.verdict and experiment.status not in {RowStatus.KEEP, RowStatus.DISCARD}:
        words.append(experiment.verdict.detail)
    return ": ".join(word for word in words if word)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def escape(text: str) -> str:
    """One cell: no tab or line break, nothing that a spreadsheet would run as a formula, nothing unprintable."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    text = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\r", "\\r").replace("\n", "\\n")
    text = "".join(character if character.isprintable() else " " for character in text)
    return f"'{text}" if text.startswith(FORMULA_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two sessions of one workspace write the same file: one at a time, by a lock on its folder."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def check_file(path: Path) -> None:
    """Refuse, before any work, a results.tsv that is not ours."""
    lines = _lines(path)
    if lines and lines[0] != HEADER:
        raise InputError(f"{path} has other columns than Overnight's: move it away or rename it, then start again.")


def append(path: Path, row: Row) -> None:
    """Add one row durably; makes the header, finishes or drops what a power cut left of the last line."""
    with _alone(path):
        _append(path, row)


def _append(path: Path, row: Row) -> None:
    check_file(path)
    lines = _lines(path)
    whole = [line for line in lines if line.count("\t") == len(COLUMNS) - 1]
    if row.key in {_key(line) for line in whole[1:]}:
        return
    if not whole or not _ends_whole(path) or whole != lines:
        _write(path, [HEADER, *whole[1:]])
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(row.line() + "\n")
        file.flush()
        os.fsync(file.fileno())


def rebuild(path: Path, rows: Sequence[Row], sessions: Iterable[str]) -> None:
    """Remake the file: rows of `sessions` from their journals, those of forgotten sessions as they stand.

    Raises InputError, and changes nothing, when the file has other columns.
    """
    known = set(sessions)
    with _alone(path):
        check_file(path)  # a file of somebody else's is never overwritten
        lines = _lines(path)[1:]
        others = [line for line in lines if line.count("\t") == len(COLUMNS) - 1 and _key(line)[0] not in known]
        mine = [row.line() for row in rows]
        _write(path, [HEADER, *sorted([*others, *mine], key=lambda line: line.split("\t")[-1])])


def read(path: Path) -> list[Mapping[str, int | float | str | None]]:
    """The file's rows with numbers as numbers and empty cells as None; raises InputError for foreign columns."""
    check_file(path)
    return [
        {name: _value(name, cell) for name, cell in zip(COLUMNS, line.split("\t"), strict=True)}
        for line in _lines(path)[1:]
        if line.count("\t") == len(COLUMNS) - 1
    ]


def _value(name: str, cell: str) -> int | float | str | None:
    if not cell:
        return None
    if name in INTEGERS:
        return int(cell)
    return float(cell) if name in NUMBERS else cell


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder: move it away or rename it, then start again.") from error
    return [line.rstrip("\r") for line in text.split("\n") if line.strip("\r")]


def _key(line: str) -> tuple[str, str]:
    cells = line.split("\t")
    return (cells[COLUMNS.index("session")], cells[0])


def _ends_whole(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")


def _write(path: Path, lines: Sequence[str]) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)

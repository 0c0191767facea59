"""The truth about a session: SQLite in WAL mode, one durable transaction for each step of each experiment.

What git and results.tsv say is derived from here. Does not protect against a disk that lies about having synced.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from agent.errors import InputError, MachineError
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, RowStatus, Usage
from harness import wire
from harness.records import Verdict

WITHDRAWN_USAGE = "withdrawn usage"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (number INTEGER PRIMARY KEY, started_at TEXT NOT NULL, active_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS experiments (
    number INTEGER PRIMARY KEY, target TEXT NOT NULL, state TEXT NOT NULL, candidate TEXT, reply TEXT, status TEXT,
    verdict TEXT, commit_id TEXT, started_at TEXT NOT NULL, finished_at TEXT, detail TEXT NOT NULL DEFAULT '',
    model_ms REAL, model_speedup REAL, judge_s REAL NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0, cost_usd REAL, calls INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True)
class Decision:
    """How an experiment ends: its row's status, and what follows from it."""

    status: RowStatus
    detail: str = ""
    commit: str | None = None
    model_ms: float | None = None
    model_speedup: float | None = None
    model_gain: float | None = None


def now_iso() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Journal:
    """One session's database; a single writer, the holder of the session's lock, and any number of readers.

    A reader (`read_only`) changes nothing and holds nothing up. `known` are recorded experiments that it has read
    before, from the first one on: they never change.
    """

    def __init__(self, path: Path, *, read_only: bool = False, known: Sequence[Experiment] = ()) -> None:
        self.path = path
        try:
            if read_only:
                self._connection = _reader(path)
                self._check_readable()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(path, isolation_level=None)
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._migrate()
        except sqlite3.DatabaseError as error:
            raise MachineError(f"The journal {path} cannot be opened: {error}.") from error
        self._parsed: dict[int, Experiment] = {one.number: one for one in known}
        self._listed: tuple[Experiment, ...] | None = None
        self._seen = -1
        self._run: int | None = None
        self._tick = time.monotonic()

    def close(self) -> None:
        """Release the database."""
        self._connection.close()

    def _schema_version(self) -> int:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise InputError(
                f"{self.path} was written by a newer Overnight (journal schema {version}, this one knows"
                f" {SCHEMA_VERSION}): update Overnight to resume this session."
            )
        return int(version)

    def _check_readable(self) -> None:
        version = self._schema_version()
        if version < SCHEMA_VERSION:
            raise InputError(
                f"{self.path} was written by an older Overnight (journal schema {version}): `overnight status"
                f" {self.path.parent.name}` brings it up to date."
            )

    def _migrate(self) -> None:
        if self._schema_version() < SCHEMA_VERSION:
            self._connection.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")

    @contextmanager
    def _step(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction; active time is accounted in the same one."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._account()
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise MachineError(
                f"The journal {self.path} cannot be written: {error}; free some space, then `overnight resume`."
            ) from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    # Experiments, one transition each

    def propose(self, target: str, candidate: Candidate | InvalidReply, *, again: bool = False) -> int:
        """Open the next experiment with its candidate stored; returns its number. One judged `again` costs nothing."""
        candidate = replace(candidate, usage=Usage(model=candidate.usage.model)) if again else candidate
        usage = candidate.usage
        stored = candidate if isinstance(candidate, Candidate) else None
        reply = candidate if isinstance(candidate, InvalidReply) else None
        with self._step() as connection:
            (last,) = connection.execute("SELECT COALESCE(MAX(number), 0) FROM experiments").fetchone()
            connection.execute(
                "INSERT INTO experiments (number, target, state, candidate, reply, started_at, tokens, cost_usd, calls)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (last + 1, target, ExperimentState.PROPOSED, _text(stored), _text(reply), now_iso(), *_usage(usage)),
            )
        self._changed(int(last) + 1)
        return int(last) + 1

    def judged(self, number: int, verdict: Verdict, *, judge_s: float, against: str = "") -> None:
        """Store the verdict: from here on the candidate is judged again only if what it beat is no longer the best.

        `against` names the incumbent it was measured against.
        """
        self._advance(
            number,
            (ExperimentState.PROPOSED,),
            ExperimentState.JUDGED,
            {"verdict": wire.to_json(verdict), "judge_s": judge_s},
            notes={f"against:{number}": against} if against else {},
        )

    def winners_against(self) -> dict[int, str]:
        """What `judged` was told about the incumbent, by experiment, of all that were told."""
        return {int(number): mark for number, mark in self._notes("against").items()}

    def against(self, number: int) -> str:
        """What `judged` was told about the incumbent."""
        return self.note(f"against:{number}") or ""

    def reopen(self, number: int) -> None:
        """A judged experiment is to be judged again: the kernel that it beat was itself beaten meanwhile."""
        self._advance(number, (ExperimentState.JUDGED,), ExperimentState.PROPOSED, {"verdict": None})

    def decided(self, number: int, decision: Decision) -> None:
        """Store how it ended; the row of results.tsv follows."""
        self._advance(
            number,
            (ExperimentState.PROPOSED, ExperimentState.JUDGED),
            ExperimentState.DECIDED,
            {
                "status": decision.status,
                "detail": decision.detail,
                "commit_id": decision.commit,
                "model_ms": decision.model_ms,
                "model_speedup": decision.model_speedup,
                "finished_at": now_iso(),
            },
            notes={f"model_gain:{number}": repr(decision.model_gain)} if decision.model_gain else {},
        )

    def recorded(self, number: int) -> None:
        """The row is in results.tsv."""
        self._advance(number, (ExperimentState.DECIDED,), ExperimentState.RECORDED, {})

    def _advance(
        self,
        number: int,
        before: tuple[ExperimentState, ...],
        after: ExperimentState,
        values: Mapping[str, str | float | None],
        notes: Mapping[str, str] | None = None,
    ) -> None:
        names = ", ".join(f"{name} = ?" for name in ("state", *values))
        marks = ", ".join("?" for _ in before)
        self._changed(number)
        with self._step() as connection:
            changed = connection.execute(
                f"UPDATE experiments SET {names} WHERE number = ? AND state IN ({marks})",  # noqa: S608 - our own names
                (after, *values.values(), number, *before),
            )
            if changed.rowcount != 1:
                raise AssertionError(f"experiment {number} cannot become {after}")
            connection.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", (notes or {}).items())

    def withdraw(self, number: int, target: str, reason: str) -> None:
        """Take back the candidate of a target that cannot be judged: no experiment, a note for the report."""
        paid = self.usage(f"number = {int(number)}")
        before = self._withdrawn_usage()
        cost = None if paid.cost_usd is None or before.cost_usd is None else paid.cost_usd + before.cost_usd
        total = Usage(before.tokens + paid.tokens, cost, before.calls + paid.calls)
        self._changed(number)
        with self._step() as connection:
            connection.execute(
                "DELETE FROM experiments WHERE number = ? AND state = ?", (number, ExperimentState.PROPOSED)
            )
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (WITHDRAWN_USAGE, wire.to_json(total)))
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (f"unjudgeable:{target}", reason))

    # Readers

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Everything read inside is of one moment, whatever a writer adds meanwhile. Raises MachineError."""
        try:
            self._connection.execute("BEGIN")
            yield
        except sqlite3.DatabaseError as error:
            raise MachineError(f"The journal {self.path} cannot be read: {error}.") from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def experiments(self) -> tuple[Experiment, ...]:
        """All experiments in order; each is parsed again only when it may have changed, a recorded one never."""
        if self._seen != (now := self._data_version()):
            self._parsed = {number: one for number, one in self._parsed.items() if one.state is _RECORDED}
            self._seen, self._listed = now, None
        if self._listed is None:
            self._listed = tuple(self._read_all())
        return self._listed

    def _read_all(self) -> Iterator[Experiment]:
        for (number,) in self._connection.execute("SELECT number FROM experiments ORDER BY number").fetchall():
            if number not in self._parsed:
                one = self.experiment(number)
                assert one is not None
                self._parsed[number] = one
            yield self._parsed[number]

    def _data_version(self) -> int:
        """Changes when another connection has written (SQLite's own word for it)."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _changed(self, number: int) -> None:
        self._parsed.pop(number, None)
        self._listed = None

    def experiment(self, number: int) -> Experiment | None:
        """One experiment, None when there is none of that number."""
        query = f"SELECT {', '.join(_COLUMNS)} FROM experiments WHERE number = ?"  # noqa: S608 - our own names
        row = self._connection.execute(query, (number,)).fetchone()
        return _experiment(row) if row else None

    def unjudgeable(self) -> dict[str, str]:
        """Targets that cannot be judged, and why."""
        return self._notes("unjudgeable")

    def forgotten(self) -> dict[str, int]:
        """Targets whose experiments up to a number no longer count, because the model changed."""
        return {target: int(number) for target, number in self._notes("forgotten").items()}

    def _notes(self, kind: str) -> dict[str, str]:
        rows = self._connection.execute("SELECT name, value FROM notes WHERE name LIKE ?", (f"{kind}:%",))
        return {name.partition(":")[2]: value for name, value in rows}

    def invalid_reply(self, number: int) -> InvalidReply | None:
        """The stored answer of a proposer that was no candidate."""
        (text,) = self._connection.execute("SELECT reply FROM experiments WHERE number = ?", (number,)).fetchone()
        return wire.from_json(InvalidReply, text) if text else None

    def judge_seconds(self) -> dict[str, float]:
        """Mean time of a judgement, seconds, by target."""
        rows = self._connection.execute(
            "SELECT target, AVG(judge_s) FROM experiments WHERE judge_s > 0 GROUP BY target"
        )
        return dict(rows.fetchall())

    def judge_s(self) -> float:
        """Seconds that all judgements took together."""
        (total,) = self._connection.execute("SELECT COALESCE(SUM(judge_s), 0) FROM experiments").fetchone()
        return float(total)

    def usage(self, which: str = "") -> Usage:
        """What all proposals have cost so far; the cost is None once one of unknown price is among them.

        `which` is a condition of ours on the experiments; without one, withdrawn proposals count too.
        """
        query = (
            "SELECT COALESCE(SUM(tokens), 0), COALESCE(SUM(cost_usd), 0), COALESCE(SUM(calls), 0),"
            " COALESCE(SUM(cost_usd IS NULL), 0) FROM experiments"
        )
        tokens, cost, calls, unpriced = self._connection.execute(f"{query} WHERE {which or 1}").fetchone()
        gone = Usage() if which else self._withdrawn_usage()
        dollars = None if unpriced or gone.cost_usd is None else float(cost) + gone.cost_usd
        return Usage(int(tokens) + gone.tokens, dollars, int(calls) + gone.calls)

    def _withdrawn_usage(self) -> Usage:
        text = self.note(WITHDRAWN_USAGE)
        return wire.from_json(Usage, text) if text else Usage()

    # Notes: small facts of the session by name

    def note(self, name: str) -> str | None:
        """A stored fact, None when there is none."""
        row = self._connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else None

    def set_note(self, name: str, value: str) -> None:
        """Store a fact."""
        with self._step() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def event(self, what: str) -> None:
        """Something that happened to the machine, for the report."""
        with self._step() as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM notes WHERE name LIKE 'event:%'").fetchone()
            connection.execute("INSERT INTO notes VALUES (?, ?)", (f"event:{now_iso()} {count:06d}", what))

    def events(self) -> tuple[tuple[str, str], ...]:
        """What happened to the machine: when (UTC, ISO) and what, in order."""
        return tuple((name.partition(" ")[0], what) for name, what in sorted(self._notes("event").items()))

    # Active time, over all resumes

    def runs(self) -> tuple[tuple[str, float], ...]:
        """When each run of the session started (UTC, ISO), and for how many seconds it was active."""
        rows = self._connection.execute("SELECT started_at, active_s FROM runs ORDER BY number")
        return tuple((str(started), float(active)) for started, active in rows)

    def start_run(self) -> None:
        """From now on time counts."""
        with self._step() as connection:
            cursor = connection.execute("INSERT INTO runs (started_at, active_s) VALUES (?, 0)", (now_iso(),))
        self._run = cursor.lastrowid
        self._tick = time.monotonic()

    def active_s(self) -> float:
        """Seconds that the session has been running, over all its runs."""
        (stored,) = self._connection.execute("SELECT COALESCE(SUM(active_s), 0) FROM runs").fetchone()
        return float(stored) + (time.monotonic() - self._tick if self._run else 0.0)

    def rest(self, seconds: float) -> None:
        """Time that passed and does not count: a pause that the user asked for."""
        self._tick += seconds

    def _account(self) -> None:
        if self._run:
            now = time.monotonic()
            spent, self._tick = now - self._tick, now
            self._connection.execute("UPDATE runs SET active_s = active_s + ? WHERE number = ?", (spent, self._run))


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; also where not even SQLite's side files can be made (a read-only disk)."""
    address = path.absolute().as_uri()
    connection = sqlite3.connect(f"{address}?mode=ro", uri=True, isolation_level=None)
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if not path.exists() or path.with_name(path.name + "-wal").exists() or os.access(path.parent, os.W_OK):
            raise
        return sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return connection


_RECORDED = ExperimentState.RECORDED
_COLUMNS = (
    "number",
    "target",
    "state",
    "candidate",
    "status",
    "verdict",
    "commit_id",
    "started_at",
    "finished_at",
    "detail",
    "model_ms",
    "model_speedup",
    "(SELECT value FROM notes WHERE name = 'model_gain:' || number)",
)


def _usage(usage: Usage) -> tuple[int, float | None, int]:
    return (usage.tokens, usage.cost_usd, usage.calls)


def _text(record: object | None) -> str | None:
    return wire.to_json(record) if record is not None else None


def _experiment(row: tuple[object, ...]) -> Experiment:
    values = dict(zip(_COLUMNS, row, strict=True))
    candidate, verdict, status = values["candidate"], values["verdict"], values["status"]
    return Experiment(
        number=int(str(values["number"])),
        target=str(values["target"]),
        state=ExperimentState(str(values["state"])),
        candidate=wire.from_json(Candidate, str(candidate)) if candidate else None,
        status=RowStatus(str(status)) if status else None,
        verdict=wire.from_json(Verdict, str(verdict)) if verdict else None,
        commit=str(values["commit_id"]) if values["commit_id"] else None,
        started_at=str(values["started_at"]),
        finished_at=str(values["finished_at"]) if values["finished_at"] else None,
        detail=str(values["detail"]),
        model_ms=_number(values["model_ms"]),
        model_speedup=_number(values["model_speedup"]),
        model_gain=_number(values[_COLUMNS[-1]]),
    )


def _number(value: object) -> float | None:
    return float(str(value)) if value is not None else None

"""What a session's files say to people and programs: its status and its rows."""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from agent.budget import Budget, Spent
from agent.journal import Journal
from agent.lock import Holder, running
from agent.places import SessionPlaces
from agent.records import Experiment, ExperimentState, RowStatus
from agent.results import Row
from agent.session import NOT_COUNTED, read_options, row
from harness import wire


@dataclass(frozen=True)
class SessionStatus:
    """How a session stands."""

    name: str
    pid: int | None
    model: str
    proposer: str
    counts: dict[str, int]
    budget: Budget
    spent: Spent
    open_experiment: int | None
    kept: tuple[Experiment, ...]

    def data(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "session": self.name,
            "running": self.pid is not None,
            "pid": self.pid,
            "model": self.model,
            "proposer": self.proposer,
            "experiments": sum(self.counts.values()),
            "by_status": self.counts,
            "open_experiment": self.open_experiment,
            "budget": wire.to_data(self.budget),
            "spent": wire.to_data(self.spent),
            "kept": [_kept_data(one) for one in self.kept],
        }

    def lines(self) -> list[str]:
        """For people."""
        state = f"running (pid {self.pid})" if self.pid else "not running"
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.counts.items())) or "none yet"
        kept = [f"  kept: {one.target} {_speedup(one)} (experiment {one.number})" for one in self.kept]
        return [
            f"session {self.name}: {state}; {self.model}; proposer {self.proposer}",
            f"experiments: {counts}; active for {self.spent.active_s / 3600:.2f} h",
            *kept,
        ]


def status_of(places: SessionPlaces) -> SessionStatus:
    """Read it from journal and lock."""
    with closing(Journal(places.journal)) as journal:
        return status_from(places.name, journal, running(places.lock))


def status_from(name: str, journal: Journal, holder: Holder | None) -> SessionStatus:
    """How a session stands by its open journal; `holder` is its living supervisor."""
    options, experiments, usage = read_options(journal), journal.experiments(), journal.usage()
    counted = [one for one in experiments if one.status not in NOT_COUNTED]
    undecided = [one.number for one in experiments if one.state is not ExperimentState.RECORDED]
    return SessionStatus(
        name=name,
        pid=holder.pid if holder else None,
        model=options.model.reference,
        proposer=options.proposer,
        counts=dict(Counter(str(one.status) for one in experiments if one.status)),
        budget=options.budget,
        spent=Spent(journal.active_s(), len(counted), usage.tokens, usage.calls, usage.cost_usd),
        open_experiment=undecided[0] if undecided else None,
        kept=tuple(one for one in experiments if one.status is RowStatus.KEEP),
    )


def rows_of(places: SessionPlaces) -> list[Row]:
    """All rows of a session, from its journal."""
    profile = places.read_profile()
    with closing(Journal(places.journal)) as journal:
        return [row(one, places.name, journal, profile) for one in journal.experiments() if one.status]


def _speedup(one: Experiment) -> str:
    timing = one.verdict.timing if one.verdict else None
    return f"{timing.speedup_vs_best:.3f}x" if timing else ""


def _kept_data(one: Experiment) -> dict[str, Any]:
    timing = one.verdict.timing if one.verdict else None
    return {
        "experiment": one.number,
        "target": one.target,
        "commit": one.commit,
        "speedup_vs_best": timing.speedup_vs_best if timing else None,
        "speedup_vs_pytorch": timing.speedup_vs_pytorch if timing else None,
        "model_ms": one.model_ms,
        "model_speedup": one.model_speedup,
    }

"""What the supervisor costs with many devices: the real loop, journal and git; judges replaced by their latency.

    python benchmarks/night.py --devices 64 --devices 512 [--seconds 60] [--median-s 6]

A seat sleeps as long as a judge takes (log-normal around the median, a quarter twice as long) and answers with a
verdict: one in forty is a win, which is committed and has the model measured (three medians). Prints, for each number
of devices: experiments an hour, the supervisor's share of one core, how long the devices were idle, the journal's size
per experiment, commits, and what the supervisor's own time went to.
"""

import argparse
import cProfile
import hashlib
import pstats
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tests_support import target, verdict  # noqa: E402

from agent import loop, opening  # noqa: E402
from agent.between import Between  # noqa: E402
from agent.errors import StopRequestedError  # noqa: E402
from agent.executors.base import Answer, Job, Kind  # noqa: E402
from agent.executors.bench import Bench  # noqa: E402
from agent.places import SessionPlaces  # noqa: E402
from agent.records import Brief, Candidate, RowStatus  # noqa: E402
from agent.session import Options, Session, Show  # noqa: E402
from agent.verbs import Harness  # noqa: E402
from harness.records import (  # noqa: E402
    JudgeRequest,
    ModelGain,
    ModelSpec,
    ModeMeasurement,
    ProfileReport,
    SiteCounts,
    Status,
    VerifyReport,
)

WINS = 40  # one candidate in so many wins
LABELS = {
    "git": ("repository.py", "git/cmd.py", "subprocess.py"),
    "journal": ("journal.py", "sqlite3"),
    "results.tsv": ("results.py",),
    "search": ("search/", "ranking.py", "proposing.py"),
    "records as JSON": ("wire.py", "pydantic", "json/"),
}


@dataclass
class Seat:
    """A device that takes as long as a judge does."""

    name: str
    median_s: float
    busy_s: float = 0.0
    kinds = frozenset({Kind.JUDGE, Kind.MEASURE})

    def run(self, job: Job) -> Answer:
        """Sleep, then answer."""
        draw = random.Random(f"{self.name} {job.number} {job.kind}")
        took = self.median_s * draw.lognormvariate(0, 0.3) * (2 if draw.random() < 0.25 else 1)
        took *= 3 if job.kind is Kind.MEASURE else 1
        time.sleep(took)
        self.busy_s += took
        return judged(job.request, draw) if isinstance(job.request, JudgeRequest) else measured(draw)

    def fault(self) -> None:
        """Never ill."""

    def close(self) -> None:
        """Nothing to end."""


def judged(request: JudgeRequest, draw: random.Random) -> Answer:
    """A verdict as large as real ones."""
    won = draw.randrange(WINS) == 0
    found = verdict(Status.KEEP if won else Status.DISCARD, 1.05 if won else 0.9)
    assert found.timing is not None
    ratios = tuple(tuple(draw.gauss(1, 0.01) for _ in range(12)) for _process in range(3))
    digest = hashlib.sha256(request.source.encode()).hexdigest()
    return replace(found, timing=replace(found.timing, ratios=ratios), kernel_sha256=digest)


def measured(draw: random.Random) -> Answer:
    """The model, a little faster."""
    modes = tuple(ModeMeasurement(name, 1.0, 0.99, 1.01, None) for name in ("overnight", "eager", "compile"))
    gain = ModelGain(1 + draw.random() / 50, 1.0, 1.02)
    return VerifyReport(
        model="m", device="cpu", device_name="d", modes=modes, outputs_ok=True, max_error=0.0, faster=True,
        model_speedup=1.1, model_speedup_vs_eager=1.2, sites=SiteCounts(2, 0),
        applied={f"t{n}": 2 for n in range(12)}, newest=gain,
    )  # fmt: skip


class Endless:
    """A proposer with a new kernel of a usual length every time, at once."""

    name = "endless"

    def __init__(self) -> None:
        self._count = 0

    def propose(self, brief: Brief) -> Candidate:
        """The next one."""
        self._count += 1
        filler = "".join(f"LINE_{n} = {n * self._count}\n" for n in range(150))
        source = f'TUNABLES = {{"A": [{self._count}]}}\n{filler}'
        return Candidate(brief.target.id, "triton", source, f"number {self._count}", self.name, f"idea {self._count}")


def session_in(folder: Path) -> Session:
    """A session in a fresh repository, its profile given."""
    for words in ("init -q", "config user.name Owl", "config user.email owl@example.org"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    (folder / "model.py").write_text("class Net: ...\n")
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "Model"], cwd=folder, check=True)
    places = SessionPlaces(folder, "night")
    opening.create(folder, "night", Options(ModelSpec("model.py:Net", device="cpu"), "cpu"))
    harness = Harness(folder, places.log, lambda: False, lambda _name, _body: None)
    show = Show(lambda _line: None, lambda _name, _body: None, lambda _report: None, lambda _report: None)
    session = opening.open_session(places, harness, show, lambda _options: Endless())
    sites = target("t", 0.1)
    shares = [0.9 / 12] * 12
    targets = tuple(replace(sites, id=f"t{n}", key=f"t{n}", share=share) for n, share in enumerate(shares))
    session.report = ProfileReport(
        model="m", device="cpu", device_name="d", mode="eager", total_ms=1.0, idle_share=0.0, uncaptured_share=0.0,
        targets=targets, peaks={},
    )  # fmt: skip
    return session


def night(devices: int, seconds: float, median_s: float) -> None:
    """One simulated night and its line."""
    with tempfile.TemporaryDirectory() as name, session_in(Path(name)) as session:
        end = [float("inf")]
        seats = [Seat(f"d{number}", median_s) for number in range(devices)]

        def over() -> bool:
            return time.monotonic() > end[0]

        with Bench(lambda _stop: seats, over, lambda _line: None) as bench:
            loop.prepare(session, bench)
            end[0] = time.monotonic() + seconds
            watch, cpu, wall = cProfile.Profile(), time.process_time(), time.monotonic()
            children = resource_s()
            watch.enable()
            try:
                loop.rounds(session, bench, Between(session))
            except StopRequestedError:
                watch.disable()
            wall = time.monotonic() - wall
            cpu, children = time.process_time() - cpu, resource_s() - children
            busy = sum(seat.busy_s for seat in seats)
        experiments = session.journal.experiments()
        done = [one for one in experiments if one.status not in {None, RowStatus.INTERRUPTED}]
        size = sum(path.stat().st_size for path in session.places.folder.glob("journal.sqlite*"))
        commits = subprocess.run(
            ["git", "rev-list", "--count", "HEAD..overnight/night"],
            cwd=name,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        print(
            f"| {devices} | {3600 * len(done) / wall:.0f} |"
            f" {100 * cpu / wall:.0f}% + {100 * children / wall:.0f}% git |"
            f" {100 * (1 - min(1.0, busy / wall / devices)):.0f}% | {size / 1024 / max(1, len(experiments)):.1f} |"
            f" {commits or '0'} | {where(watch)} |",
            flush=True,
        )


def resource_s() -> float:
    """Seconds of processor time that ended children took."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def where(watch: cProfile.Profile) -> str:
    """What the supervisor's own thread spent its time on, by part, of the time that it did not wait."""
    spent: Counter[str] = Counter()
    for (file, _line, name), (_calls, _all, own, _total, _callers) in pstats.Stats(watch).stats.items():  # type: ignore[attr-defined]
        if "acquire" in name or "lock" in name or "queue" in name.lower() or "sleep" in name:
            continue
        part = next((label for label, words in LABELS.items() if any(word in file for word in words)), None)
        part = part or ("files, pipes and processes" if file == "~" else "other")
        spent[part] += own
    total = sum(spent.values())
    return ", ".join(f"{part} {100 * own / total:.0f}%" for part, own in spent.most_common(4))


def main() -> int:
    """Print a line for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--median-s", type=float, default=6.0)
    options = parser.parse_args()
    threading.stack_size(1 << 18)
    print(
        "| devices | experiments an hour | supervisor (core) | devices idle | journal, KB each | commits | own time |"
    )
    print("|---|---|---|---|---|---|---|")
    for devices in options.devices or [64, 512]:
        night(devices, options.seconds, options.median_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

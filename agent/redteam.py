"""The red team: whole kernel files that must be refused (cheats) or accepted (honest), and what became of them."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agent.errors import InputError, MachineError, OursError
from agent.harness_client import PACKAGE_ROOT
from agent.verbs import JUDGE_TIMEOUT_S, Harness
from harness.records import Blame, JudgeRequest, LibraryPolicy, Status, Verdict

HEADER_LINES = 6


class Kind(StrEnum):
    """Which corpus a file is of."""

    CHEAT = "cheats"
    HONEST = "honest"


class Outcome(StrEnum):
    """`other_reason` is a cheat refused for another reason than it names; `undecided` is nobody's verdict."""

    RIGHT = "right"
    OTHER_REASON = "other_reason"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Specimen:
    """One file: `expect` holds stages or guards for a cheat, nothing for an honest kernel."""

    name: str
    kind: Kind
    source: str
    target: str
    expect: tuple[str, ...]
    policy: LibraryPolicy
    devices: tuple[str, ...]
    slow: bool = False  # it waits out a time limit
    by_chance: str = ""  # why a lucky secret draw may let it pass once in a while

    def request(self, device: str, *, bench: bool = True) -> JudgeRequest:
        """What the judge is asked."""
        return JudgeRequest(self.target, self.source, device=device, library_calls=self.policy, bench=bench)

    def runs_on(self, device: str) -> bool:
        """Whether the trick, or the oddity, exists there."""
        return device in self.devices

    def outcome(self, verdict: Verdict) -> Outcome:
        """Whether the judge was right about it."""
        if verdict.status is Status.ENVIRONMENT or verdict.blame in {Blame.ENVIRONMENT, Blame.OURS}:
            return Outcome.UNDECIDED
        if verdict.accepted is not (self.kind is Kind.HONEST):
            return Outcome.WRONG
        if self.kind is Kind.HONEST or {verdict.stage, verdict.guard} & set(self.expect):
            return Outcome.RIGHT
        return Outcome.OTHER_REASON


@dataclass(frozen=True)
class Trial:
    """One specimen judged once; `verdict` is None when the judge gave none, and `detail` says why."""

    specimen: Specimen
    outcome: Outcome
    detail: str
    verdict: Verdict | None


def corpus() -> Path:
    """The folder of both corpora; raises InputError where they were not installed."""
    candidates = (PACKAGE_ROOT / "tests" / "redteam", Path(sysconfig.get_path("data")) / "share/overnight/redteam")
    for folder in candidates:
        if all((folder / kind).is_dir() for kind in Kind):
            return folder
    raise InputError(
        f"The red team's files are neither in {candidates[0]} nor in {candidates[1]}: reinstall overnight."
    )


def specimens(folder: Path, only: str = "") -> list[Specimen]:
    """All files whose name holds `only`, those of one device and cheats first; raises InputError when there is none."""
    paths = [(kind, path) for kind in Kind for path in sorted((folder / kind).glob("*.py")) if only in path.stem]
    if not paths:
        raise InputError(f"--only {only}: no file of the red team's has that in its name.")
    return sorted((read(kind, path) for kind, path in paths), key=lambda one: len(one.devices))


def read(kind: Kind, path: Path) -> Specimen:
    """A file and what its first lines say of it."""
    source = path.read_text(encoding="utf-8")
    lines = [line[2:] for line in source.splitlines()[:HEADER_LINES] if line.startswith("# ") and ": " in line]
    header = {name: value.strip() for name, value in (line.split(": ", 1) for line in lines)}
    where = header.get("device", "any")
    return Specimen(
        path.stem,
        kind,
        source,
        header.get("target", "softmax"),
        tuple(header.get("expect", "").split(" or ")),
        LibraryPolicy(header.get("policy", "allow")),
        ("cpu", "cuda") if where == "any" else (where,),
        "slow" in header,
        header.get("chance", ""),
    )


def judged(harness: Harness, chosen: Sequence[Specimen], device: str, *, bench: bool) -> Iterator[Trial]:
    """Judge them one after another in one judge, as in a night; a judge that is lost is started anew.

    Raises InputError when the request itself is refused, which is then true of every specimen.
    """
    left = list(chosen)
    while left:
        with harness.start("judge") as judge:
            while left:
                specimen = left.pop(0)
                timed = bench or specimen.kind is Kind.CHEAT
                try:
                    verdict = judge.call(
                        "judge", specimen.request(device, bench=timed), Verdict, timeout_s=JUDGE_TIMEOUT_S
                    )
                except (MachineError, OursError) as error:
                    yield Trial(specimen, Outcome.UNDECIDED, str(error), None)
                    break
                yield Trial(specimen, specimen.outcome(verdict), verdict.detail, verdict)


def data(trials: Sequence[Trial], device: str) -> dict[str, object]:
    """What `redteam --json` prints."""

    def count(kind: Kind, outcome: Outcome | None = None) -> int:
        return sum(t.specimen.kind is kind and outcome in {None, t.outcome} for t in trials)

    return {
        "device": device,
        "cheats": count(Kind.CHEAT),
        "cheats_accepted": count(Kind.CHEAT, Outcome.WRONG),
        "other_reason": count(Kind.CHEAT, Outcome.OTHER_REASON),
        "honest": count(Kind.HONEST),
        "honest_refused": count(Kind.HONEST, Outcome.WRONG),
        "undecided": sum(trial.outcome is Outcome.UNDECIDED for trial in trials),
        "trials": [_row(trial) for trial in trials],
    }


def _row(trial: Trial) -> dict[str, object]:
    verdict = trial.verdict
    return {
        "name": trial.specimen.name,
        "kind": trial.specimen.kind.value,
        "target": trial.specimen.target,
        "expected": list(trial.specimen.expect) if trial.specimen.kind is Kind.CHEAT else ["accepted"],
        "outcome": trial.outcome.value,
        "status": verdict.status.value if verdict else None,
        "stage": verdict.stage.value if verdict and verdict.stage else None,
        "guard": verdict.guard if verdict else None,
        "detail": trial.detail,
        "seconds": round(sum(stage.seconds for stage in verdict.stages.values()), 3) if verdict else None,
    }

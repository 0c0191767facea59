"""The order of the playbook: first every structure that could win, then numeric sweeps over the best of them.

A pure function of the brief: an idea's tactic names it, ideas come in a fixed order, and the first whose tactic is not
among the attempts is next. So a resumed session goes on where the interrupted one was.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.proposers.playbook import known, library
from agent.proposers.playbook.fuser import Unsupported, fusions
from agent.proposers.playbook.ideas import Idea
from agent.records import Attempt, Brief, Candidate, NothingLeft, RowStatus
from agent.search.archive import ranked
from agent.search.lines import SWEEP
from agent.search.settings import apply_setting, read_setting
from agent.search.sweep import sweep_of

NAME = "playbook"
HOPELESS = 0.75  # a correct kernel this slow against the incumbent is not worth a sweep
# On the CPU the generated kernel is at least as fast for norms and rotations, the hand-written one for these:
HAND_TUNED_FIRST = frozenset(
    {"attention", "cross_entropy", "gelu", "groupnorm", "groupnorm_silu", "silu_mul", "softmax"}
)
BASES = 2  # how many structures are swept


@dataclass(frozen=True)
class Playbook:
    """Known kernels, fused kernels, library calls and sweeps; needs no key and no network."""

    kernels_root: Path | None = None

    @property
    def name(self) -> str:
        """The `proposer` column."""
        return NAME

    def propose(self, brief: Brief) -> Candidate | NothingLeft:
        """The next untried idea for the target, or why there is none."""
        tried = brief.played()
        reasons: list[str] = []
        for idea in structures(brief, self.kernels_root or kernels_folder(), reasons):
            if idea.tactic not in tried:
                return _candidate(brief, idea)
        for idea in sweeps(brief):
            if idea.tactic not in tried:
                return _candidate(brief, idea)
        again = second_chance(brief)
        if again is not None:
            return again
        return NothingLeft(brief.target.id, _why_nothing(brief, reasons))


def kernels_folder() -> Path:
    """The starter kernels: those of the checkout, or of the installed distribution.

    Beside an installed `agent` a folder `kernels` may be Hugging Face's package of that name; it has no `cpp` folder.
    """
    checkout = Path(__file__).resolve().parents[3] / "kernels"
    installed = Path(sysconfig.get_path("data")) / "share" / "overnight" / "kernels"
    return checkout if (checkout / "cpp").is_dir() else installed


def structures(brief: Brief, root: Path, reasons: list[str]) -> Iterator[Idea]:
    """Every whole kernel that fits the target, likely wins first; what does not fit leaves its reason."""
    routes: list[Callable[[], Iterator[Idea]]] = [
        lambda: known.ideas(brief, root),
        lambda: fusions(brief),
        lambda: library.ideas(brief),
    ]
    if brief.device == "cpu" and brief.target.kind not in HAND_TUNED_FIRST:
        routes[0], routes[1] = routes[1], routes[0]
    for route in routes:
        try:
            yield from route()
        except Unsupported as error:
            reasons.append(str(error))


def sweeps(brief: Brief) -> Iterator[Idea]:
    """The next setting of the TUNABLES of the best structures, each until a few tries in a row have won nothing."""
    for base in _bases(brief.attempts):
        setting = read_setting(base.source)
        if setting is None:
            continue
        structure = structure_of(base.tactic)
        found = sweep_of(base, brief.attempts, brief.in_flight)
        if found is not None:
            change = setting.changes(found)
            yield Idea(
                tactic=f"{SWEEP}{structure}: {found.text}",
                backend=base.backend,
                source=apply_setting(base.source, found),
                description=f"{structure} with {change}",
                hypothesis=f"{change} suits this machine and shape better",
            )


def second_chance(brief: Brief) -> Candidate | None:
    """A candidate that the machine, not the judge, turned down is tried once more when all else was tried."""
    for attempt in brief.attempts:
        same = [other for other in brief.attempts if other.tactic == attempt.tactic]
        again = any(candidate.tactic == attempt.tactic for candidate in brief.in_flight)
        if len(same) == 1 and attempt.status is RowStatus.ENVIRONMENT and not again:
            words = (attempt.description, "the machine was unwell the first time")
            return _candidate(brief, Idea(attempt.tactic, attempt.backend, attempt.source, *words))
    return None


def structure_of(tactic: str) -> str:
    """The structure that a tactic belongs to: its own name, or what a sweep varies."""
    return tactic.removeprefix(SWEEP).split(": ", 1)[0] if tactic.startswith(SWEEP) else tactic


def _bases(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The fastest correct attempt of each structure, the fastest structures first."""
    best: dict[str, Attempt] = {}
    for attempt in ranked(attempts):
        best.setdefault(structure_of(attempt.tactic), attempt)
    return [attempt for attempt in best.values() if (_speed(attempt) or 0.0) >= HOPELESS][:BASES]


def _speed(attempt: Attempt) -> float | None:
    verdict = attempt.verdict
    return verdict.timing.speedup_vs_best if verdict and verdict.accepted and verdict.timing else None


def _candidate(brief: Brief, idea: Idea) -> Candidate:
    return Candidate(
        target=brief.target.id,
        backend=idea.backend,
        source=idea.source,
        description=idea.description,
        proposer=NAME,
        tactic=idea.tactic,
        hypothesis=idea.hypothesis,
    )


def _why_nothing(brief: Brief, reasons: Sequence[str]) -> str:
    if brief.attempts:
        return "every structure and sweep of the playbook was tried"
    return f"no kernel of the playbook fits: {reasons[0]}" if reasons else "no kernel of the playbook fits"

"""The archive of a target: its best correct kernel of each structure, a dozen at most, read off its attempts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent.records import Attempt
from agent.search.settings import read_setting

SIZE = 12
TILE_NAME = re.compile(r"BLOCK|TILE|ROWS|COLS|VECTOR|CHUNK|THREADS")
PIPELINED = re.compile(r"num_stages\s*=\s*[2-9]|cp\.async|cp_async|__pipeline|make_tensor_descriptor|TMA\b")
PERSISTENT = re.compile(r"tl\.num_programs|gridDim\.x|PERSISTENT|#pragma omp for")
LAUNCHED = re.compile(r"@triton\.jit|__global__|#pragma omp parallel")
SMALL_TILE, LARGE_TILE = 1024, 16384  # elements


@dataclass(frozen=True, order=True)
class Structure:
    """The bin of a kernel: what a numeric sweep cannot change about it."""

    backend: str
    tile: str  # "none", "small", "middle", "large"
    flow: str  # "plain", "pipelined", "persistent", "both"
    kernels: str  # "library", "fused", "several"

    @property
    def text(self) -> str:
        """For prompts and reports."""
        return f"{self.backend}, {self.kernels}, {self.flow}, tile {self.tile}"


def structure_of(source: str, backend: str) -> Structure:
    """The bin of a kernel file, from its text."""
    pipelined, persistent = bool(PIPELINED.search(source)), bool(PERSISTENT.search(source))
    flow = {(0, 0): "plain", (1, 0): "pipelined", (0, 1): "persistent", (1, 1): "both"}[pipelined, persistent]
    launched = len(LAUNCHED.findall(source))
    kernels = "library" if launched == 0 else "fused" if launched == 1 else "several"
    return Structure(backend, _tile(source), flow, kernels)


def _tile(source: str) -> str:
    setting = read_setting(source)
    if setting is None:
        return "none"
    elements = 1
    for name, choice in setting.current.items():
        if TILE_NAME.search(name) and isinstance(choice, int):
            elements *= max(choice, 1)
    return "small" if elements <= SMALL_TILE else "large" if elements > LARGE_TILE else "middle"


def speed(attempt: Attempt) -> float | None:
    """Eager time over kernel time, comparable between attempts with different incumbents; None unless correct."""
    verdict = attempt.verdict
    if verdict is None or not verdict.accepted or verdict.timing is None or verdict.timing.candidate_us <= 0:
        return None
    return verdict.timing.eager_us / verdict.timing.candidate_us


def ranked(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The correct ones, the fastest first, the earlier of equals first."""
    correct = [one for one in attempts if speed(one) is not None]
    return sorted(correct, key=lambda one: (-(speed(one) or 0.0), one.number))


def archive(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """The fastest correct kernel of each structure, the fastest first."""
    best: dict[Structure, Attempt] = {}
    for one in ranked(attempts):
        best.setdefault(structure_of(one.source, one.backend), one)
    return tuple(best.values())[:SIZE]

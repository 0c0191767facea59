"""What a worker is asked and answers, as checked values, and the ways in which it can fail."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psutil

from harness.arena import Slot
from harness.records import Scalar


class Execution(StrEnum):
    """How a kernel is called: directly, through a dispatcher op as when spliced, or as its compiled artefact."""

    PLAIN = "plain"
    OP = "op"
    COMPILE = "compile"


MEMORY_BYTES, MEMORY_SHARE = 16 << 30, 0.6


def _memory_bytes() -> int:
    """At most a share of what is free now: a worker that takes all it may must not push others out."""
    return min(MEMORY_BYTES, int(psutil.virtual_memory().available * MEMORY_SHARE))


@dataclass(frozen=True)
class Limits:
    """What one worker may use. Beyond `log_bytes` output is thrown away, beyond `output_bytes` the worker is killed."""

    memory_bytes: int = field(default_factory=_memory_bytes)
    processes: int = 256
    file_bytes: int = 2 << 30
    scratch_bytes: int = 4 << 30
    log_bytes: int = 1 << 18
    output_bytes: int = 1 << 27
    start_timeout_s: float = 60.0


@dataclass(frozen=True)
class OutputReport:
    """What a worker says one output was; `copied` when its elements lie in the slot, contiguously, in its own dtype."""

    type_name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage_nbytes: int
    aliases_input: bool
    copied: bool
    device: str


@dataclass(frozen=True)
class CallReport:
    """One call's outputs; `structure` is the returned object's type name, `count` its number of leaves."""

    outputs: tuple[OutputReport, ...]
    structure: str
    count: int
    peak_memory_mb: float | None
    hooked: bool = False  # a trace, profile hook or torch mode of the kernel's runs between its calls
    kept: bool = False  # the kernel still holds the memory of an output after the call
    patched: str = ""  # a function of torch's, Python's or ours that the kernel replaced
    library: tuple[str, ...] = ()  # what did the work besides the file's own code, where the call was audited
    switched: str = ""  # a global switch that the kernel left otherwise


@dataclass(frozen=True)
class PreparedCall:
    """A call of the timed runs; `positional` constants follow the inputs, `results` is the number of outputs."""

    inputs: tuple[Slot, ...]
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    positional: tuple[Scalar, ...] = ()
    results: int = 1


@dataclass(frozen=True)
class Prepared:
    """How the timed runs will go: replayed as one CUDA graph, or launched one by one (and why)."""

    graphed: bool
    reason: str


@dataclass(frozen=True)
class Sample:
    """One timed run: the judge's clock around the round trip, and the worker's claim of device time."""

    seconds: float
    device_seconds: float | None
    addresses: tuple[tuple[int, ...], ...] = ()
    """Where a CPU worker says the outputs of each prepared call lie."""


@dataclass(frozen=True)
class Census:
    """Processes of a worker's tree (its guard left out) and their threads."""

    processes: int
    threads: int


class KernelRaised(Exception):  # noqa: N818 - names read as what happened
    """The kernel raised, at import or in a call."""

    def __init__(self, type_name: str, message: str, trace: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name, self.message, self.trace = type_name, message, trace


class WorkerTimeout(Exception):  # noqa: N818 - names read as what happened
    """The worker did not answer in time; it has been killed."""


class WorkerDied(Exception):  # noqa: N818 - names read as what happened
    """The worker ended without an answer: `exit_code` or `signal` says how, `reason` which limit it broke."""

    def __init__(self, message: str, exit_code: int | None = None, signal: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.signal, self.reason = exit_code, signal, reason


class WorkerOutOfMemory(Exception):  # noqa: N818 - names read as what happened
    """The worker ran out of memory, or was killed for using too much."""


def call_report(answer: Mapping[str, Any]) -> CallReport:
    """Read a worker's description of its outputs; raises KeyError, TypeError, ValueError or AttributeError."""
    outputs = tuple(_output_report(entry) for entry in answer["outputs"])
    memory = number(answer.get("peak_memory_mb"))
    return CallReport(
        outputs,
        text(answer["structure"]),
        int(answer["count"]),
        memory,
        answer.get("hooked") is True,
        answer.get("kept") is True,
        text(answer.get("patched"))[:200],
        tuple(text(name)[:200] for name in list(answer.get("library") or ())[:16]),
        text(answer.get("switched"))[:200],
    )


def _output_report(entry: Mapping[str, Any]) -> OutputReport:
    return OutputReport(
        type_name=text(entry["type_name"]),
        dtype=text(entry.get("dtype")),
        shape=tuple(int(size) for size in entry.get("shape", ())),
        stride=tuple(int(step) for step in entry.get("stride", ())),
        storage_offset=int(entry.get("storage_offset", 0)),
        storage_nbytes=int(entry.get("storage_nbytes", 0)),
        aliases_input=entry.get("aliases_input") is True,
        copied=entry.get("copied") is True,
        device=text(entry.get("device")),
    )


def text(value: object) -> str:
    """A string of bounded length that can be stored and shown; empty when the worker sent something else.

    Lone surrogates and control characters (a terminal would obey them) are replaced.
    """
    if not isinstance(value, str):
        return ""
    plain = value[:20000].encode("utf-8", "replace").decode("utf-8")
    return "".join(sign if sign.isprintable() or sign == "\n" else " " if sign == "\t" else "?" for sign in plain)


def number(value: object) -> float | None:
    """A finite float, None when the worker sent something else."""
    try:
        return float(value) if type(value) in {int, float} and math.isfinite(value) else None  # type: ignore[arg-type]
    except OverflowError:
        return None


def device_seconds(value: object) -> float | None:
    """A worker's claim of device time. Raises ValueError for one that no clock can show."""
    if value is None:
        return None
    seconds = number(value)
    if seconds is None or seconds <= 0:
        raise ValueError(f"device time of {text(str(value))[:40]}")
    return seconds


def addresses(value: object) -> tuple[tuple[int, ...], ...]:
    """Where outputs lie; raises TypeError or ValueError for what is no list of lists of addresses."""
    if not isinstance(value, list):
        return ()
    found = tuple(tuple(int(address) for address in call) for call in value)
    if any(not 0 <= address < 1 << 64 for call in found for address in call):
        raise ValueError("an address beyond memory")
    return found

"""Where compiled code says which of its statements is running; the only state that profiled code shares with us."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Marking(StrEnum):
    """What a mark does: nothing, read the clock, or open a named span for the device profiler."""

    OFF = "off"
    CLOCK = "clock"
    SPAN = "span"


SPAN_PREFIX = "overnight::"


@dataclass
class _State:
    marking: Marking = Marking.OFF
    events: list[tuple[int, int]] = field(default_factory=list)  # statement, nanoseconds
    span: Any = None


STATE = _State()


def mark(statement: int) -> None:
    """Called before each statement of instrumented code, and with -1 after it."""
    if STATE.marking is Marking.CLOCK:
        STATE.events.append((statement, time.perf_counter_ns()))
    elif STATE.marking is Marking.SPAN:
        _span(statement)


def _span(statement: int) -> None:
    if STATE.span is not None:
        STATE.span.__exit__(None, None, None)
        STATE.span = None
    if statement >= 0:
        from torch.profiler import record_function

        STATE.span = record_function(f"{SPAN_PREFIX}{statement}")
        STATE.span.__enter__()


def start(marking: Marking) -> None:
    """Begin a run."""
    STATE.events.clear()
    STATE.marking = marking


def stop() -> dict[int, float]:
    """End a run; µs per statement when the clock was read."""
    STATE.marking = Marking.OFF
    spent: dict[int, float] = {}
    for (statement, began), (_, ended) in zip(STATE.events, STATE.events[1:], strict=False):
        if statement >= 0:
            spent[statement] = spent.get(statement, 0.0) + (ended - began) / 1e3
    STATE.events.clear()
    return spent

"""What was measured of a compiled model, on whatever device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.instrument import Statement


@dataclass(frozen=True)
class Measured:
    """The deployed mode: the whole model in ms, and µs per forward for each statement of its generated code.

    `graphs` holds the node names of each compiled graph, by which statements are traced back.
    """

    mode: str
    total_ms: float
    statement_us: Mapping[int, float]
    statements: Sequence[Statement]
    graphs: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()

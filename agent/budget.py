"""What a night may use up, what it has used, and whether to stop. Pure."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from agent.errors import InputError

# The last part of the hours is kept for the final verification of the model.
VERIFICATION_SHARE = 0.1


@dataclass(frozen=True)
class Budget:
    """Limits over all runs of a session; None is no limit."""

    hours: float | None = None
    experiments: int | None = None
    dollars: float | None = None
    tokens: int | None = None
    calls: int | None = None


@dataclass(frozen=True)
class Spent:
    """What the session has used. `dollars` is None once a call of unknown price was made."""

    active_s: float
    experiments: int
    tokens: int
    calls: int
    dollars: float | None


def exhausted(budget: Budget, spent: Spent) -> str | None:
    """Why no further experiment may start, None while one may."""
    if budget.experiments is not None and spent.experiments >= budget.experiments:
        return f"{spent.experiments} of {budget.experiments} experiments are done"
    if budget.hours is not None and spent.active_s >= budget.hours * 3600 * (1 - VERIFICATION_SHARE):
        return f"{spent.active_s / 3600:.2f} of {budget.hours:g} hours are used; the rest is for the final verification"
    if budget.tokens is not None and spent.tokens >= budget.tokens:
        return f"{spent.tokens} of {budget.tokens} tokens are used"
    if budget.calls is not None and spent.calls >= budget.calls:
        return f"{spent.calls} of {budget.calls} model calls are made"
    if budget.dollars is not None and spent.dollars is not None and spent.dollars >= budget.dollars:
        return f"${spent.dollars:.2f} of ${budget.dollars:.2f} are spent"
    return None


def amended(budget: Budget, flags: dict[str, str | None]) -> Budget:
    """The budget with the flags of `run` or `resume`: `8` sets, `+2` adds to what was allowed. Raises InputError."""
    for field in fields(Budget):
        text = flags.get(field.name)
        if text is not None:
            change: dict[str, Any] = {field.name: _amount(field.name, text, getattr(budget, field.name))}
            budget = replace(budget, **change)
    return budget


def _amount(name: str, text: str, before: float | None) -> float:
    whole = name in {"experiments", "tokens", "calls"}
    if not re.fullmatch(r"\+?\d+" if whole else r"\+?\d+(\.\d+)?|\+?\.\d+", text.strip()):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"--{name} {text} must be {kind}, or +{'N' if whole else 'X'} to extend the budget.")
    value = float(text)
    total = value + (before or 0) if text.strip().startswith("+") else value
    return int(total) if whole else total

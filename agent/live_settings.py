"""Edits of overnight.yaml while a session lives: the safe part takes effect between two experiments, the rest is said.

Safe is what changes no verdict: budgets, how proposers are reached, who is notified. What a flag has set stays, since
flags win. A file with a mistake is said once, and what was read before stays in force.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agent.budget import Budget
from agent.config import CONFIG_NAME, Config, load_config
from agent.errors import InputError
from agent.llm_settings import from_config
from agent.records import Command
from agent.session import Session

NOTE = "settings"
BUDGETS = tuple(field.name for field in fields(Budget))


class LiveSettings:
    """The settings of a running session, as last read."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._path = Path(session.options.config or session.places.root / CONFIG_NAME)
        self._seen: bytes | None = None

    def look(self) -> None:
        """Take over what changed since the last look."""
        text = self._text()
        if text == self._seen and self._session.journal.note(NOTE) is not None:
            return
        self._seen = text
        try:
            now = load_config(self._session.places.root, self._path if self._session.options.config else None)
            self._take_over(now)
        except InputError as error:
            self._session.say(f"{str(error).rstrip('.')}: the settings read before stay in force")

    def _text(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def _take_over(self, now: Config) -> None:
        journal = self._session.journal
        stored = journal.note(NOTE)
        before = Config.model_validate_json(stored) if stored else now
        changed = _changed(before.model_dump(mode="json"), now.model_dump(mode="json"))
        if changed:
            self._apply(now, changed)
        if changed or stored is None:
            journal.set_note(NOTE, now.model_dump_json())

    def _apply(self, now: Config, changed: list[str]) -> None:
        session, old = self._session, self._session.options
        flagged = [name for name in changed if {name.removeprefix("budget."), name.split(".")[0]} & set(old.flags)]
        live = [name for name in changed if is_safe(name) and name not in flagged]
        limits = {name: getattr(now.budget, name) for name in BUDGETS if f"budget.{name}" in live}
        new = replace(old, budget=replace(old.budget, **limits))
        if any(name.startswith("command.") for name in live):
            new = replace(new, command=Command(tuple(now.command.argv), now.command.timeout_s))
        if any(name.startswith("llm.") for name in live):
            new = replace(new, llm=from_config(now.llm))
        session.change_options(new)
        for words, names in (
            ("takes effect now", live),
            ("does not count: a flag of run or resume set it", flagged),
            ("takes effect in a new session only", [name for name in changed if name not in {*live, *flagged}]),
        ):
            if names:
                session.say(f"{self._path.name} has changed: {', '.join(names)} {words}")


def is_safe(name: str) -> bool:
    """Whether a setting may change while a session runs."""
    return name.partition(".")[0] in {"budget", "llm", "command", "notify"}


def _changed(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, other in after.items():
        one = before.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += _changed(one, other, f"{prefix}{name}.")
        elif one != other:
            names.append(prefix + name)
    return names

"""Numeric sweeps: another choice of one entry of a file's TUNABLES, its first element being the one in force."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Choice = int | float | str | bool


@dataclass(frozen=True)
class Setting:
    """The choices of one file: name → (all choices in their original order, the one in force)."""

    choices: Mapping[str, tuple[Choice, ...]]
    current: Mapping[str, Choice]

    def with_choice(self, name: str, choice: Choice) -> "Setting":
        """The same file with one entry changed."""
        return Setting(self.choices, {**self.current, name: choice})

    @property
    def text(self) -> str:
        """Short and the same for equal settings: `ROWS=4 WARPS=8`."""
        return " ".join(f"{name}={choice}" for name, choice in sorted(self.current.items()))


def read_setting(source: str) -> Setting | None:
    """The TUNABLES of a kernel file, or None when it declares none that can be read."""
    node = _assignment(source)
    if node is None:
        return None
    try:
        table = ast.literal_eval(node.value)
    except ValueError:
        return None
    if not isinstance(table, dict) or not all(isinstance(entry, list | tuple) and entry for entry in table.values()):
        return None
    choices = {str(name): tuple(entry) for name, entry in table.items()}
    return Setting(choices, {name: entry[0] for name, entry in choices.items()})


def apply_setting(source: str, setting: Setting) -> str:
    """The file with each current choice moved to the front of its list."""
    node = _assignment(source)
    if node is None:
        raise ValueError("the file declares no TUNABLES")
    entries = ", ".join(f'"{name}": {_ordered(setting, name)}' for name in setting.choices)
    lines = source.splitlines(keepends=True)
    end = node.end_lineno or node.lineno
    lines[node.lineno - 1 : end] = [f"TUNABLES = {{{entries}}}\n"]
    return "".join(lines)


def _ordered(setting: Setting, name: str) -> str:
    first = setting.current[name]
    rest = [choice for choice in setting.choices[name] if choice != first]
    return "[" + ", ".join(_literal(choice) for choice in (first, *rest)) + "]"


def _literal(choice: Choice) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)


def neighbours(setting: Setting, tried: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    """Settings that differ in one entry and were not tried, as (what changed, setting)."""
    for name in setting.choices:
        for choice in setting.choices[name]:
            changed = setting.with_choice(name, choice)
            if choice != setting.current[name] and changed.text not in tried:
                yield f"{name}={choice}", changed


def _assignment(source: str) -> ast.Assign | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "TUNABLES" for t in node.targets):
            return node
    return None

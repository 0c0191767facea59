"""The TUNABLES of a kernel file: read, and written back with other choices; each list's first entry is in force."""

import ast
from collections.abc import Mapping
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
    def names(self) -> tuple[str, ...]:
        """Entries that leave a choice."""
        return tuple(name for name, entry in self.choices.items() if len(entry) > 1)

    def changes(self, other: "Setting") -> str:
        """How `other` differs from this one: `ROWS=4`."""
        changed = [name for name in self.names if other.current[name] != self.current[name]]
        return " ".join(f"{name}={other.current[name]}" for name in changed)

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


def _assignment(source: str) -> ast.Assign | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "TUNABLES" for t in node.targets):
            return node
    return None

"""Tells the user by Apprise, or by a command of theirs, of a night's first win and of its end; no night waits for it.

Each message has a process of its own, which gives up after SENDER_LIMIT_S and ends with everything that it started.
Addresses hold secrets: they reach that process on its standard input, and no message, log or journal of ours ever
names more of one than its place in the list and its scheme.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import InputError, MachineError, OvernightError
from agent.harness_client import PACKAGE_ROOT
from agent.visible import one_line

SENDER = PACKAGE_ROOT / "agent" / "notify_sender.py"
SENDER_LIMIT_S = 30.0
CHECK_LIMIT_S = 30.0
COMMAND = "command:"
VARIABLE = re.compile(r"\$\{(\w+)\}")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,19}")


@dataclass(frozen=True)
class News:
    """One message: what happened, for people and for programs."""

    event: str  # "first_win", "finish" or "stop"
    session: str
    title: str
    body: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """What a hook command reads on its standard input."""
        return {**self.facts, **{name: value for name, value in asdict(self).items() if name != "facts"}}


@dataclass(frozen=True)
class Address:
    """One entry of `notify`, with what may be said of it."""

    label: str
    url: str = field(repr=False)
    argv: tuple[str, ...] = field(default=(), repr=False)


def addresses(entries: Sequence[str], environment: Mapping[str, str]) -> tuple[Address, ...]:
    """Parse `notify`; `${NAME}` is taken from the environment. Raises InputError naming the entry, never its text."""
    return tuple(_address(place, entry, environment) for place, entry in enumerate(entries, start=1))


def _address(place: int, entry: str, environment: Mapping[str, str]) -> Address:
    label = f"entry {place} of notify"
    for name in VARIABLE.findall(entry):
        if name not in environment:
            raise InputError(f"{label}: the environment variable {name} is not set: set it, or take the entry out.")
    text = VARIABLE.sub(lambda match: environment[match[1]], entry).strip()
    if text.startswith(COMMAND):
        return Address(f"{label} (command)", "", _argv(label, text.removeprefix(COMMAND)))
    scheme, found, rest = text.partition("://")
    if not found or not rest or not SCHEME.fullmatch(scheme.lower()):
        raise InputError(f"{label} must be an Apprise address like ntfy://topic, or `command:PROGRAM ARGUMENTS`.")
    return Address(f"{label} ({scheme.lower()})", text)


def _argv(label: str, text: str) -> tuple[str, ...]:
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(f"{label}: the command cannot be split into words ({error}): close its quotes.") from error
    if not argv:
        raise InputError(f"{label}: command: needs the program to run after it.")
    return argv


def check(entries: Sequence[str]) -> None:
    """Refuse addresses that nobody could be told by; raises InputError, or MachineError when Apprise is missing."""
    found = addresses(entries, os.environ)
    if not any(one.url for one in found):
        return
    try:
        done = subprocess.run(
            _sender_command(),
            input=_request(found, None),
            capture_output=True,
            timeout=CHECK_LIMIT_S,
            start_new_session=True,
            check=False,
        )
        refused = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return  # a machine too slow to ask; it will be said when a message cannot be sent
    if refused == "no apprise":
        raise MachineError("notify needs Apprise: pip install 'overnight[notify]', or take its addresses out.")
    for place in refused:
        raise InputError(f"{found[place].label} is not an address that Apprise understands.")


class Messenger:
    """The processes that carry messages; they outlive neither their limit nor, unnoticed, the session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sending: list[subprocess.Popen[bytes]] = []

    def tell(self, entries: Sequence[str], news: News) -> None:
        """Start sending and return at once. Raises InputError for an entry that cannot be used."""
        found = addresses(entries, os.environ)
        process = subprocess.Popen(
            _sender_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._root,
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(_request(found, news))
            process.stdin.close()
        self._sending.append(process)

    @property
    def sending(self) -> int:
        """How many messages were on their way at the last look."""
        return len(self._sending)

    def complaints(self, patience_s: float = 0.0) -> list[str]:
        """What could not be told, of all messages that are through by now or within the patience."""
        until = time.monotonic() + patience_s
        while any(one.poll() is None for one in self._sending) and time.monotonic() < until:
            time.sleep(0.05)
        through = [one for one in self._sending if one.poll() is not None]
        self._sending = [one for one in self._sending if one not in through]
        return [line for one in through for line in _complaints(one)]


class Announcer:
    """What a session tells its user through; nothing that goes wrong here ever reaches the session."""

    def __init__(self, root: Path, entries: Callable[[], Sequence[str]], say: Callable[[str], None]) -> None:
        self._messenger = Messenger(root)
        self._entries = entries  # read anew each time: overnight.yaml may change while a session lives
        self._say = say

    def tell(self, news: Callable[[], News]) -> None:
        """Start sending, if anybody is to be told, or say why not."""
        try:
            entries = self._entries()
            if entries:
                self._messenger.tell(entries, news())
        except (OvernightError, OSError, ValueError) as error:
            self._say(f"nobody was told of it: {one_line(str(error))}")
        self.complain()

    def complain(self, patience_s: float = 0.0, *, last: bool = False) -> None:
        """Say what could not be told; at the `last` also what is still on its way."""
        for line in self._messenger.complaints(patience_s):
            self._say(line)
        if last and self._messenger.sending:
            self._say(f"a message is still being sent; it is given up after {SENDER_LIMIT_S:.0f} s")


def _complaints(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stdout is not None
    with process.stdout as output:
        text = output.read(100_000)
    try:
        lines = json.loads(text)
    except ValueError:
        return [f"a message could not be sent within {SENDER_LIMIT_S:.0f} s"]
    return [one_line(str(line)) for line in lines] if isinstance(lines, list) else [one_line(str(lines))]


def _sender_command() -> list[str]:
    return [sys.executable, "-P", "-B", str(SENDER)]


def _request(found: Sequence[Address], news: News | None) -> bytes:
    asked = [asdict(one) for one in found]
    data = {"addresses": asked, "news": news.data() if news else None, "limit_s": SENDER_LIMIT_S}
    return json.dumps(data).encode()

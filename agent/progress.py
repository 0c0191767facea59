"""What a terminal shows of a night: a line for what happened, one moving line for what is going on.

Where nobody is looking (a pipe, a log), only the lines, at once and without colour.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from agent.visible import one_line, visible

if TYPE_CHECKING:
    from rich.status import Status

WIDTH = 140
NOBODY_READS = {errno.EPIPE, errno.EIO}
STYLES = {"keep": "bold green", "incorrect": "red", "cheat": "bold red", "crash": "red", "environment": "yellow"}
WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "progress": lambda body: str(body.get("message", "")),
    "stage": lambda body: f"judging: {body.get('stage')} {body.get('status')}",
    "baseline": lambda body: f"measuring the baseline of {body.get('target')}",
    "outputs": lambda body: f"outputs of the model {'agree' if body.get('ok') else 'DIFFER'}",
    "mode": lambda body: f"measuring the model: {body.get('mode')} {body.get('reason') or 'is ready'}",
    "compiled": lambda body: f"compiled: {'; '.join(body.get('kernels', [])) or 'nothing by Triton'}",
    "bisect": lambda body: f"bisecting: {body.get('target')}",
}


class Progress:
    """The terminal of one command. Between `with` it may own a moving line."""

    def __init__(self) -> None:
        from rich.console import Console

        interactive = sys.stdout.isatty()
        self._gone = False
        self.console: Console = Console() if interactive else Console(width=WIDTH, color_system=None)
        self._status: Status | None = self.console.status("starting", spinner="dots") if interactive else None

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        if self._gone:
            return
        words = line.split()
        style = STYLES.get(words[1]) if len(words) > 1 and words[0].isdigit() else None
        try:
            self.console.print(visible(line), style=style, highlight=False, markup=False, soft_wrap=True)
            sys.stdout.flush()
        except SystemExit:  # rich's own answer to a broken pipe
            self._leave()
        except OSError as error:
            if error.errno not in NOBODY_READS:
                raise
            self._leave()

    def _leave(self) -> None:
        """The terminal, or the reader of a pipe, is gone: the night is worth more than its lines."""
        self._gone, self._status = True, None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

    def event(self, name: str, body: Mapping[str, Any]) -> None:
        """What a harness process says of itself, on the moving line."""
        if self._status:
            from rich.markup import escape

            self._status.update(escape(one_line(event_words(name, body), self.console.width - 4)))


def event_words(name: str, body: Mapping[str, Any]) -> str:
    """An event of the harness in words."""
    known = WORDS.get(name)
    return known(body) if known else " ".join([name, *(str(value) for value in body.values())])

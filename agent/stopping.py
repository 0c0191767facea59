"""How a session is asked to stop: the first signal asks, the second Ctrl-C ends the process at once."""

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopFlag:
    """Set by SIGTERM, Ctrl-C or `overnight stop`; asked by whoever waits."""

    requested: bool = False

    def __call__(self) -> bool:
        """Whether to stop now."""
        return self.requested

    def listen(self, *, detached: bool) -> None:
        """Install the handlers. A detached session survives the terminal that started it (SIGHUP)."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if detached else self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

"""Server-sent events: which sessions have changed, as their revisions; a page then asks anew for what it shows."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

from agent.dashboard.shelf import Shelf

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
MAX_LISTENERS = 100


class Feed:
    """All listeners of one dashboard."""

    def __init__(self, shelf: Shelf, ending: Callable[[], bool]) -> None:
        self._shelf, self._ending = shelf, ending
        self._listeners = 0

    @property
    def full(self) -> bool:
        """Whether nobody more can listen."""
        return self._listeners >= MAX_LISTENERS

    async def events(self) -> AsyncIterator[str]:
        """An event at once, then one for each change, and a sign of life between."""
        self._listeners += 1
        try:
            last: dict[str, str] | None = None
            silent_s = 0.0
            while not self._ending():
                now = await asyncio.to_thread(self._shelf.revisions)
                silent_s += POLL_S
                if now != last:
                    yield f"event: revisions\ndata: {json.dumps(now)}\n\n"
                    last, silent_s = now, 0.0
                elif silent_s >= KEEP_ALIVE_S:
                    yield ": still here\n\n"
                    silent_s = 0.0
                await asyncio.sleep(POLL_S)
        finally:
            self._listeners -= 1

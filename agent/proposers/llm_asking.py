"""Asking until there is an answer: our own retry loop, one wall-clock cap around all tries, on the monotonic clock.

litellm's retries are off: they hide the error and know no cap.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from agent.errors import StopRequestedError
from agent.proposers.llm_provider import Answer, AskingFailedError, Failing, Patience
from agent.records import LanguageModel, Llm

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
UNREACHABLE_TRIES = 3  # nobody has ever answered there: a wrong address is said soon
POLL_S = 0.05

Ask = Callable[[LanguageModel, str, int, Patience], Answer]


@dataclass(frozen=True)
class Asking:
    """How one question is put. `say` tells the user of every wait; `stop` is asked while waiting."""

    ask: Ask
    settings: Llm
    stop: Callable[[], bool]
    say: Callable[[str], None]

    def until_answered(self, model: LanguageModel, prompt: str, max_tokens: int, *, known: bool) -> Answer:
        """Try again what may pass until `call_timeout_s` is over. `known`: this model has answered before.

        Raises AskingFailedError with the last reason, StopRequestedError on a clean stop.
        """
        deadline = time.monotonic() + self.settings.call_timeout_s
        tries, before = 0, ""
        while True:
            tries += 1
            try:
                return self.ask(model, prompt, max_tokens, self._patience(deadline - time.monotonic()))
            except AskingFailedError as error:
                before = before if error.capped and before else str(error)
                wait_s = _wait_s(error, before, tries, deadline - time.monotonic(), known=known)
                self.say(f"{error} Waiting {wait_s:.0f} s.")
            self._wait(wait_s)

    def _patience(self, left_s: float) -> Patience:
        chosen = self.settings
        return Patience(chosen.first_token_timeout_s, chosen.stall_timeout_s, max(left_s, POLL_S))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.stop():
                raise StopRequestedError
            time.sleep(min(POLL_S, max(until - time.monotonic(), 0.0)))


def _wait_s(error: AskingFailedError, reason: str, tries: int, left_s: float, *, known: bool) -> float:
    """How long to wait before the next try; raises the error when there is to be none."""
    if error.kind in {Failing.PERMANENT, Failing.TOO_LONG}:
        raise error
    if error.kind is Failing.UNREACHABLE and not known and tries >= UNREACHABLE_TRIES:
        raise error
    asked_s = error.retry_after_s
    wait_s = asked_s if asked_s is not None else min(FIRST_WAIT_S * 2 ** (tries - 1), LONGEST_WAIT_S)
    if wait_s >= left_s:
        words = (
            f"it asks to wait {asked_s:.0f} s"
            if asked_s is not None
            else f"{tries} {'try' if tries == 1 else 'tries'} failed"
        )
        raise AskingFailedError(
            error.kind,
            f"{reason.rstrip('.')}; {words}, and llm.call_timeout_s is up.",
            received_chars=error.received_chars,
        ) from error
    return wait_s

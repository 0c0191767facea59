"""The one file around litellm: one streamed request to a language model within its deadlines, its failure classified.

Retrying is not done here (llm_asking.py), nor does this protect against a provider that bills what it did not send.
"""

import asyncio
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

from agent.errors import StopRequestedError
from agent.proposers.llm_keys import key_of, provider_of
from agent.records import LanguageModel

REPLY_LIMIT_CHARS = 1 << 20
POLL_S = 0.05
CANCEL_PATIENCE_S = 2.0
# Before the import: no look-up of prices on the network, no .env file read, no chatter.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
PERMANENT_STATUS = {400, 401, 402, 403, 404, 405, 410, 413, 422}
NO_CREDIT = ("insufficient_quota", "exceeded your current quota", "billing", "credit balance", "insufficient balance")
TOO_LONG = ("context_length_exceeded", "maximum context length", "context window", "prompt is too long")


class Failing(StrEnum):
    """Why a request brought no answer, by what can be done about it."""

    PERMANENT = "permanent"  # asking again cannot help: no key, no credit, no such model
    TRANSIENT = "transient"  # busy, limited, broken off, too slow
    UNREACHABLE = "unreachable"  # nobody is listening there
    TOO_LONG = "too long"  # the prompt does not fit the model


class AskingFailedError(Exception):
    """A request without an answer. `received_chars` came before it broke off and may be billed."""

    def __init__(
        self,
        kind: Failing,
        message: str,
        *,
        retry_after_s: float | None = None,
        received_chars: int = 0,
        capped: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.capped = capped  # by the whole call's time, not by a limit of the reply's
        self.retry_after_s = retry_after_s
        self.received_chars = received_chars


@dataclass(frozen=True)
class Patience:
    """How long one request may take, seconds."""

    first_token_s: float
    stall_s: float
    total_s: float


@dataclass(frozen=True)
class Answer:
    """What a model answered. Token counts are None when the server did not say."""

    text: str
    finish: str | None
    reasoning_chars: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    overlong: bool = False


@dataclass
class _Heard:
    """What has come of a stream so far; the watching side reads the times."""

    started: float
    last: float | None = None
    text: str = ""
    reasoning_chars: int = 0
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def chars(self) -> int:
        return len(self.text) + self.reasoning_chars


class Provider:
    """Asks language models by name. Owns an event loop and its connections; `close` ends them."""

    def __init__(self, stop: Callable[[], bool], environment: Mapping[str, str] = os.environ) -> None:
        self._stop = stop
        self._environment = environment
        self._loop = asyncio.new_event_loop()
        self._unstreamed: set[LanguageModel] = set()

    def close(self) -> None:
        """Release the event loop."""
        self._loop.close()

    def ask(self, model: LanguageModel, prompt: str, max_tokens: int, patience: Patience) -> Answer:
        """One answer. Raises AskingFailedError, StopRequestedError; ends soon after `patience.total_s`."""
        litellm = _litellm()
        missing = self._missing_keys(litellm, model)
        if missing:
            raise AskingFailedError(Failing.PERMANENT, f"{model.model} needs {' or '.join(missing)} in the environment")
        request = self._request(litellm, model, prompt, max_tokens, patience)
        heard = _Heard(time.monotonic())
        try:
            self._loop.run_until_complete(self._watched(self._listen(litellm, model, request, heard), heard, patience))
        except (
            litellm.exceptions.openai.OpenAIError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            raise classified(error, heard.chars, model) from error
        if heard.finish is None and not heard.chars and heard.prompt_tokens is None:
            raise AskingFailedError(Failing.TRANSIENT, "the server's answer holds no completion (a web page, perhaps)")
        return _answer(heard)

    def prices(self, model: str) -> tuple[float, float] | None:
        """Dollars per prompt token and per completion token from litellm's own map, None where it has none."""
        known = _litellm().model_cost
        names = [model, model.partition("/")[2]] if provider_of(model) else [model]
        for name in names:
            entry = known.get(name) or {}
            if entry.get("input_cost_per_token") is not None and entry.get("output_cost_per_token") is not None:
                return float(entry["input_cost_per_token"]), float(entry["output_cost_per_token"])
        return None

    def _missing_keys(self, litellm: Any, model: LanguageModel) -> list[str]:
        if model.api_base is not None or model.api_key_env is not None or provider_of(model.model):
            return []  # known to this project: checked before the session began
        said = litellm.validate_environment(model.model)
        return [] if said["keys_in_environment"] else [str(name) for name in said["missing_keys"]]

    def _request(
        self, litellm: Any, model: LanguageModel, prompt: str, max_tokens: int, patience: Patience
    ) -> dict[str, Any]:
        import httpx

        known = {str(getattr(one, "value", one)) for one in litellm.provider_list}
        prefixed = model.api_base is None or (model.model.partition("/")[0] in known and "/" in model.model)
        return {
            "model": model.model if prefixed else f"openai/{model.model}",
            "messages": [{"role": "user", "content": prompt}],
            "api_base": model.api_base,
            "api_key": key_of(model, self._environment),
            "max_tokens": max_tokens,
            "max_retries": 0,
            "timeout": httpx.Timeout(patience.total_s + 60.0, connect=min(patience.total_s, 20.0)),  # ours come first
            "drop_params": True,
        }

    async def _listen(self, litellm: Any, model: LanguageModel, request: dict[str, Any], heard: _Heard) -> None:
        """Streamed; whole from a server that does not stream."""
        if model not in self._unstreamed:
            await _stream(litellm, request, heard)
            if heard.chars or heard.prompt_tokens is not None:
                return
        whole = await litellm.acompletion(**request)
        _hear_whole(whole, heard)
        self._unstreamed.add(model)

    async def _watched(self, work: Any, heard: _Heard, patience: Patience) -> None:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done():
                    self._check(heard, patience)
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_PATIENCE_S)

    def _check(self, heard: _Heard, patience: Patience) -> None:
        if self._stop():
            raise StopRequestedError
        now = time.monotonic()
        for limit_s, since, words in (
            (patience.total_s, heard.started, "the call was not finished within"),
            (patience.first_token_s, heard.started if heard.last is None else now, "no first token within"),
            (patience.stall_s, now if heard.last is None else heard.last, "the reply stalled for"),
        ):
            if now - since > limit_s:
                capped = limit_s is patience.total_s
                said = f"{words} {limit_s:.3g} s"
                raise AskingFailedError(Failing.TRANSIENT, said, received_chars=heard.chars, capped=capped)


async def _stream(litellm: Any, request: dict[str, Any], heard: _Heard) -> None:
    stream = await _opened(litellm, request)
    try:
        async for chunk in stream:
            _hear(chunk, heard)
            if heard.chars > REPLY_LIMIT_CHARS:
                return
    except litellm.exceptions.openai.OpenAIError as error:
        if not _ended_unfinished(error) or not heard.chars:
            raise
        heard.finish = None  # the stream ended in order, the reply did not: truncated, not failed
    finally:
        with suppress(AttributeError, RuntimeError):
            await stream.aclose()


async def _opened(litellm: Any, request: dict[str, Any]) -> Any:
    try:
        return await litellm.acompletion(**request, stream=True, stream_options={"include_usage": True})
    except litellm.exceptions.BadRequestError as error:
        if "stream_options" not in str(error):
            raise
        return await litellm.acompletion(**request, stream=True)


def _hear(chunk: Any, heard: _Heard) -> None:
    usage = getattr(chunk, "usage", None)
    if usage is not None:
        heard.prompt_tokens, heard.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    for choice in chunk.choices[:1]:
        said = choice.delta.content or ""
        thought = getattr(choice.delta, "reasoning_content", None) or ""
        heard.text += said
        heard.reasoning_chars += len(thought)
        heard.finish = choice.finish_reason or heard.finish
        if said or thought:
            heard.last = time.monotonic()


def _hear_whole(whole: Any, heard: _Heard) -> None:
    choice = whole.choices[0]
    heard.text = choice.message.content or ""
    heard.reasoning_chars = len(getattr(choice.message, "reasoning_content", None) or "")
    heard.finish = choice.finish_reason
    usage = getattr(whole, "usage", None)
    if usage is not None and usage.total_tokens:
        heard.prompt_tokens, heard.completion_tokens = usage.prompt_tokens, usage.completion_tokens


def _answer(heard: _Heard) -> Answer:
    overlong = heard.chars > REPLY_LIMIT_CHARS
    text, thought_chars = without_thoughts(heard.text[:REPLY_LIMIT_CHARS])
    return Answer(
        text=text,
        finish=heard.finish,
        reasoning_chars=heard.reasoning_chars + thought_chars,
        prompt_tokens=heard.prompt_tokens,
        completion_tokens=heard.completion_tokens,
        overlong=overlong,
    )


def without_thoughts(text: str) -> tuple[str, int]:
    """A reply without the thinking that some servers leave in it as `<think>...</think>`, and how much that was."""
    start = text.find("<think>")
    end = text.rfind("</think>")
    if end >= 0 and (start == -1 or start < end):
        kept = text[: max(start, 0)] + text[end + len("</think>") :]
    elif start >= 0 and not text[:start].strip():
        kept = ""  # it never came to the answer
    else:
        kept = text
    return kept, len(text) - len(kept)


def classified(error: BaseException, received_chars: int, model: LanguageModel) -> AskingFailedError:
    """What can be done about a failure of litellm, and its reason in one line."""
    causes = list(_causes(error))
    status = next((code for code in (getattr(one, "status_code", None) for one in causes) if isinstance(code, int)), 0)
    words = " ".join(f"{one} {getattr(one, 'code', '')} {getattr(one, 'body', '')}" for one in causes).lower()
    reason = f"{model.model}: {_reason(error)}"
    if any(isinstance(one, ConnectionRefusedError) or type(one).__name__ == "ConnectError" for one in causes):
        return AskingFailedError(Failing.UNREACHABLE, f"{reason} Nobody answers at {model.api_base or 'the provider'}.")
    if any(sign in words for sign in TOO_LONG):
        return AskingFailedError(Failing.TOO_LONG, reason)
    if status in PERMANENT_STATUS or any(sign in words for sign in NO_CREDIT):
        return AskingFailedError(Failing.PERMANENT, _with_status(reason, status) + _advice(status, model))
    wait_s = next((seconds for seconds in map(_retry_after_s, causes) if seconds is not None), None)
    said = _with_status(reason, status)
    return AskingFailedError(Failing.TRANSIENT, said, retry_after_s=wait_s, received_chars=received_chars)


def _with_status(reason: str, status: int) -> str:
    return f"{reason} (HTTP {status})" if status else reason


def _advice(status: int, model: LanguageModel) -> str:
    if status in {401, 403} and model.api_base and not model.api_key_env:
        return "; name the variable that holds the server's key with --api-key-env"
    if status in {404, 405} and model.api_base:
        return f"; is {model.api_base} right (most servers want /v1 at its end), and does it serve that model?"
    return ""


def _reason(error: BaseException) -> str:
    """The provider's own words, without litellm's chain of class names."""
    text = " ".join(str(error).split()) or type(error).__name__
    for mark in ("Original exception:", "Traceback"):
        text = text.partition(mark)[0].strip()
    while ": " in text[:60] and (" " not in text[: text.index(": ")]) and "rror" in text[: text.index(": ")]:
        text = text[text.index(": ") + 2 :]
    return text.removeprefix("OpenAIException - ").rstrip(".")[:300] + "."


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        todo += [one.__cause__, one.__context__, getattr(one, "original_exception", None)]


def _retry_after_s(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None)
    value = headers.get("retry-after") if headers else None
    if headers is None or value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):  # a date: how far it lies after the server's own clock, not ours
        now = parsedate_to_datetime(headers["date"])
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    return None


def _ended_unfinished(error: BaseException) -> bool:
    return "ended before a finish_reason" in str(error)


def _litellm() -> Any:
    """Imported at the first call: it takes seconds."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    # litellm's types warn about themselves as they are used
    warnings.filterwarnings("ignore", category=UserWarning, module=r"pydantic\._internal\._generate_schema")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    litellm.disable_aiohttp_transport = True  # it hides a reset connection
    litellm.disable_hf_tokenizer_download = True
    litellm.REPEATED_STREAMING_CHUNK_LIMIT = REPLY_LIMIT_CHARS  # a model going in circles has replied, badly
    return litellm

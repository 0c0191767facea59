"""The language-model proposer: picks the tactic and the file to start from, asks, and reads one kernel file out.

What a reply cost is on disk before the reply is used, so a session that is cut off never buys it twice.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent import machine
from agent.errors import BudgetReachedError, ProviderError
from agent.places import write_whole
from agent.proposers import llm_keys
from agent.proposers.base import Proposer
from agent.proposers.llm_asking import Asking
from agent.proposers.llm_models import in_order
from agent.proposers.llm_provider import Answer, AskingFailedError, Failing, Provider
from agent.proposers.prompt import TOKENS, Assignment, estimated_tokens, prompt_for
from agent.proposers.replies import backend_of, read_reply
from agent.proposers.tactics import (
    MOST_REPAIRS,
    REPAIR_MARK,
    REPAIRABLE,
    Tactic,
    catalogue,
    next_tactic,
    repair_of,
)
from agent.records import Attempt, Brief, Candidate, InvalidReply, LanguageModel, Llm, Move, Usage
from agent.search.archive import structure_of
from harness import wire

PENDING = "llm-pending.json"
EMPTY_RETRIES = 2  # a reasoning model that thought itself out of room gets more room, twice
FEWEST_TOKENS = 4096  # of a reply that a nearly used up budget still pays for
TRUNCATED_BELOW = 0.5  # of the tokens that we count in our prompt
SMALLEST_PROMPT = 2000
PATIENCE_CALLS = 3  # calls in a row that brought nothing, from a provider that has answered before


@dataclass(frozen=True)
class Bought:
    """A proposal that was paid for, kept until the journal has it."""

    number: int  # the experiment that it becomes
    target: str
    candidate: Candidate | None = None
    invalid: InvalidReply | None = None
    usage: Usage = field(default_factory=Usage)  # of calls that brought no proposal yet


class LlmProposer:
    """Asks language models for one edit at a time."""

    name = "llm"

    def __init__(
        self,
        settings: Llm,
        *,
        data: Path,
        folder: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _line: None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        llm_keys.check(settings.models, environment)
        self._settings = settings
        self._data = data
        self._folder = folder
        self._hide = llm_keys.hider(environment, settings.models)
        self._provider = Provider(stop, environment)
        self._asking = Asking(self._provider.ask, settings, stop, lambda line: say(self._hide(line)))
        self._say = say
        self._answered: set[LanguageModel] = set()
        self._refused: dict[LanguageModel, str] = {}
        self._windows: dict[LanguageModel, int] = {}

    def propose(self, brief: Brief) -> Candidate | InvalidReply:
        """One edit. Raises ProviderError when no model can be asked, BudgetReachedError, StopRequestedError."""
        bought = self._bought(brief)
        if bought and (bought.candidate or bought.invalid):
            self._say(f"the reply bought for {bought.target} before the interruption is used")
            return bought.candidate or bought.invalid or _never()
        tactic, task = self._assignment(brief)
        proposal = self._ask_for(brief, tactic, task, bought.usage if bought else Usage())
        candidate = proposal if isinstance(proposal, Candidate) else None
        invalid = proposal if isinstance(proposal, InvalidReply) else None
        self._keep(Bought(brief.number, brief.target.id, candidate, invalid))
        return proposal

    def unpriced(self) -> tuple[str, ...]:
        """Models whose price litellm's map does not have."""
        return tuple(one.model for one in self._settings.models if self._provider.prices(one.model) is None)

    # What to ask

    def _assignment(self, brief: Brief) -> tuple[str, Assignment]:
        """The tactic's name as the journal knows it, and what the prompt is made of."""
        knowledge = hardware_knowledge(self._data / "knowledge", brief)
        failed = to_repair(brief)
        if failed:
            name, count = repair_of(failed.tactic)
            detail = f"{failed.verdict.stage or 'the file'}: {failed.verdict.detail}" if failed.verdict else ""
            task = Assignment(base=failed.source, failure=detail, repair=count + 1, knowledge=knowledge, edits=True)
            return f"{name}{REPAIR_MARK}{count + 1}", task
        base, note = base_of(brief)
        begun = base is not None or any(one.verdict and one.verdict.accepted for one in brief.attempts)
        tactic: Tactic = next_tactic(brief, catalogue(self._data / "tactics"), has_base=begun)
        return tactic.name, Assignment(tactic, base, note, knowledge=knowledge, edits=base is not None)

    def _ask_for(self, brief: Brief, tactic: str, task: Assignment, usage: Usage) -> Candidate | InvalidReply:
        """Ask one model after the other until one answers."""
        lost = 0
        while True:
            model = self._next_model(brief, usage)
            prompt = self._hide(prompt_for(brief, replace(task, tokens=self._windows.get(model, TOKENS))))
            try:
                return self._ask_model(brief, model, prompt, tactic, task, usage)
            except AskingFailedError as error:
                usage = _with_partial(usage, error, prompt)
                self._keep(Bought(brief.number, brief.target.id, usage=usage))
                lost += 1
                self._after_failure(model, error, lost)

    def _next_model(self, brief: Brief, usage: Usage) -> LanguageModel:
        open_ones = [one for one in self._settings.models if one not in self._refused]
        if not open_ones:
            reasons = "; ".join(dict.fromkeys(self._refused.values()))
            raise ProviderError(f"No language model can be asked: {reasons}")
        self._check_budget(brief, usage)
        return in_order(open_ones, brief.history, f"{len(brief.history)}:{brief.target.id}")[0]

    def _after_failure(self, model: LanguageModel, error: AskingFailedError, lost: int) -> None:
        """Set the model aside, shorten its prompts, or give up."""
        reason = self._hide(str(error))
        if error.kind is Failing.TOO_LONG and self._windows.get(model, TOKENS) > SMALLEST_PROMPT:
            self._windows[model] = self._windows.get(model, TOKENS) // 2
            self._say(f"the prompt does not fit {model.model}: it is shortened to {self._windows[model]} tokens")
            return
        if error.kind in {Failing.PERMANENT, Failing.TOO_LONG} or model not in self._answered:
            self._refused[model] = reason
            others = len(self._settings.models) - len(self._refused)
            if others:
                self._say(f"{model.model} is not asked any more: {reason}")
            return
        if lost >= PATIENCE_CALLS:
            raise ProviderError(f"{lost} calls in a row brought no answer: {reason}")
        self._say(f"no answer: {reason} Asking anew.")

    # Asking

    def _ask_model(
        self, brief: Brief, model: LanguageModel, prompt: str, tactic: str, task: Assignment, usage: Usage
    ) -> Candidate | InvalidReply:
        """One model's answer as a proposal; empty answers are asked for again with more room."""
        room = self._room(brief, model, prompt, usage)
        for retry in range(EMPTY_RETRIES + 1):
            answer = self._asking.until_answered(model, prompt, room, known=model in self._answered)
            answer = replace(answer, text=self._hide(answer.text))
            self._answered.add(model)
            usage = self._paid(usage, model, prompt, answer)
            self._keep(Bought(brief.number, brief.target.id, usage=usage))
            if answer.text.strip() or answer.finish == "content_filter":
                break
            if retry < EMPTY_RETRIES and _within(brief, usage):
                room *= 2
                self._say(f"{model.model} answered without text ({_thoughts(answer)}): asked again with {room} tokens")
            else:
                break
        reason = unusable(answer)
        reading = read_reply(answer.text, task.base) if not reason else None
        if reading is None or reading.source is None:
            words = reason or (reading.reason if reading else "")
            return InvalidReply(brief.target.id, self.name, words, prompt, answer.text, usage)
        return Candidate(
            target=brief.target.id,
            backend=backend_of(reading.source),
            source=reading.source,
            description=reading.hypothesis or f"{tactic} by {model.model}",
            proposer=self.name,
            tactic=tactic,
            hypothesis=reading.hypothesis,
            prompt=prompt,
            reply=answer.text,
            usage=usage,
            parents=_parents(brief, task),
        )

    def _room(self, brief: Brief, model: LanguageModel, prompt: str, usage: Usage) -> int:
        """Tokens that the reply may have: the setting, or what is left of the dollars pays for."""
        room, prices, left = self._settings.max_tokens, self._provider.prices(model.model), brief.allowance.dollars
        if left is None or prices is None or prices[1] <= 0:
            return room
        affordable = int((left - (usage.cost_usd or 0.0) - estimated_tokens(prompt) * prices[0]) / prices[1])
        return min(room, max(affordable, FEWEST_TOKENS))

    def _check_budget(self, brief: Brief, usage: Usage) -> None:
        if not _within(brief, usage):
            raise BudgetReachedError("what is left of the budget for language models is used")

    def _paid(self, usage: Usage, model: LanguageModel, prompt: str, answer: Answer) -> Usage:
        """What one more answer has cost, with what the morning should know about it."""
        counted = estimated_tokens(prompt)
        asked = answer.prompt_tokens if answer.prompt_tokens is not None else counted
        said = answer.completion_tokens
        if said is None:
            said = estimated_tokens(answer.text) + answer.reasoning_chars // 4
        prices = self._provider.prices(model.model)
        cost = None if prices is None else asked * prices[0] + said * prices[1]
        notes = list(usage.notes)
        if prices is None:
            notes.append(f"the price of {model.model} is unknown: its cost is not counted")
        if answer.prompt_tokens is None:
            notes.append(f"{model.model}: the server says nothing about tokens; they are estimated")
        elif answer.prompt_tokens < TRUNCATED_BELOW * counted:
            self._windows[model] = max(answer.prompt_tokens, SMALLEST_PROMPT)
            notes.append(
                f"{model.model}: the server read {answer.prompt_tokens} tokens of a prompt of about {counted}: it cuts"
                " prompts silently; raise its context window"
            )
        return replace(
            usage,
            tokens=usage.tokens + asked + said,
            cost_usd=None if cost is None or usage.cost_usd is None else usage.cost_usd + cost,
            calls=usage.calls + 1,
            prompt_tokens=usage.prompt_tokens + asked,
            completion_tokens=usage.completion_tokens + said,
            model=model.model,
            finish=answer.finish or "none",
            notes=tuple(dict.fromkeys(notes)),
        )

    # What was bought

    def _bought(self, brief: Brief) -> Bought | None:
        """What was paid for the coming experiment before a cut, None when nothing was or the journal has it."""
        if self._folder is None:
            return None
        try:
            bought = wire.from_json(Bought, (self._folder / PENDING).read_bytes())
        except FileNotFoundError:
            return None
        return bought if bought.number == brief.number and bought.target == brief.target.id else None

    def _keep(self, bought: Bought) -> None:
        if self._folder is not None:
            write_whole(self._folder / PENDING, wire.to_json(bought))


def unpriced(proposer: Proposer) -> tuple[str, ...]:
    """Models of an llm proposer whose price is unknown."""
    return proposer.unpriced() if isinstance(proposer, LlmProposer) else ()


def to_repair(brief: Brief) -> Attempt | None:
    """The last attempt, when it was a language model's, failed in a way that can be mended, not mended twice."""
    last = brief.attempts[-1] if brief.attempts else None
    if last is None or last.proposer != LlmProposer.name or last.status not in REPAIRABLE:
        return None
    return last if repair_of(last.tactic)[1] < MOST_REPAIRS else None


def base_of(brief: Brief) -> tuple[str | None, str]:
    """The file to start from: the one that the search works on, else the kept one, else none."""
    base = brief.plan.base
    if brief.plan.move is Move.START and any(one.verdict for one in brief.attempts):
        return None, ""
    if base is None or base.source == brief.incumbent_source:
        return brief.incumbent_source, "the kept kernel, to be beaten" if brief.incumbent_source else ""
    timing = base.verdict.timing if base.verdict else None
    speed = f", {timing.candidate_us:.1f} µs" if timing else ""
    return base.source, f"experiment {base.number}: {structure_of(base.source, base.backend).text}{speed}"


def unusable(answer: Answer) -> str:
    """Why an answer is not even read, "" when it is."""
    if answer.overlong:
        return "the reply was longer than a megabyte"
    if answer.finish == "content_filter":
        return "the provider's content filter withheld the reply"
    if not answer.text.strip():
        return f"the reply held no text ({_thoughts(answer)})"
    if answer.finish == "length":
        return "the reply was cut off at its limit of tokens: answer with less text, or with edits"
    if answer.finish is None:
        return "the reply broke off: the server ended it without a finish_reason"
    return ""


def hardware_knowledge(folder: Path, brief: Brief) -> str:
    """What is known about this kind of device."""
    if brief.device == "cpu":
        name = "avx512" if "avx512f" in machine.cpu_flags() else "avx2"
    else:
        name = next((name for name, sign in GPUS if sign in f" {brief.device_name} "), "gpu")
    return _text_of(folder / f"{name}.md")


GPUS = (
    ("hopper", "H100"), ("hopper", "H200"), ("hopper", "H800"), ("hopper", "GH200"), ("ampere", "A100"),
    ("ampere", "A800"), ("ampere", "RTX 30"), ("ampere", " A10"), ("ada", "RTX 40"), ("ada", "L40"),
    ("ada", " L4 "), ("cdna", "MI2"), ("cdna", "MI3"),
)  # fmt: skip


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _parents(brief: Brief, task: Assignment) -> tuple[int, ...]:
    """The experiments that a candidate comes from: what the prompt showed."""
    if task.repair:
        return brief.attempts[-1].parents
    return brief.plan.parents if task.base is not None else ()


def _within(brief: Brief, usage: Usage) -> bool:
    left = brief.allowance
    if left.calls is not None and usage.calls >= left.calls:
        return False
    return left.dollars is None or usage.cost_usd is None or usage.cost_usd < left.dollars or usage.calls == 0


def _with_partial(usage: Usage, error: AskingFailedError, prompt: str) -> Usage:
    """What a broken off reply is likely to be billed at."""
    if not error.received_chars:
        return usage
    asked, said = estimated_tokens(prompt), error.received_chars // 4
    return replace(
        usage,
        tokens=usage.tokens + asked + said,
        prompt_tokens=usage.prompt_tokens + asked,
        completion_tokens=usage.completion_tokens + said,
        notes=(*usage.notes, "a reply that broke off is counted by estimate"),
    )


def _thoughts(answer: Answer) -> str:
    if answer.reasoning_chars:
        return f"{answer.reasoning_chars} characters of reasoning, finish_reason {answer.finish}"
    return f"finish_reason {answer.finish}"


def _never() -> InvalidReply:
    raise AssertionError("a bought proposal is a candidate or an invalid reply")

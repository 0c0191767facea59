"""Does an optimised language model choose the same words? Teacher-forced top-1 agreement and perplexity.

The text is the user's own where they gave inputs; else ids that the eager model itself draws: from random ids, each is
replaced a few times by a draw from what the model predicts there, all places at once. Both models read the same text;
no step sees what either of them chose.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.outputs import TRUST, TRUST_FLOAT, copied, leaves, restored
from harness.records import TextAgreement

STEPS = 64  # teacher-forced steps, at least
SWEEPS = 8
SEED = 20261201
PERPLEXITY_LIMIT = 1e-2  # relative, and less where the dtype allows less
IDS = ("input_ids", "ids", "tokens", "idx", "token_ids")
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Speaker:
    """Where a language model takes its ids (a keyword, or a position) and how many words it knows."""

    place: str | int
    vocabulary: int

    def ids(self, inputs: Inputs) -> torch.Tensor:
        """The ids in some inputs."""
        args, kwargs = inputs
        found: torch.Tensor = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        return found

    def with_ids(self, inputs: Inputs, ids: torch.Tensor) -> Inputs:
        """The same inputs with other ids."""
        args, kwargs = inputs
        if isinstance(self.place, int):
            return (*args[: self.place], ids, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.place: ids}


def speaker_of(model: nn.Module, inputs: Inputs) -> Speaker | None:
    """How to read a causal language model, or None when it is none: ids [B, S] in, logits [B, S, words] out."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    place = _ids_place(model, inputs)
    if place is None:
        return None
    ids = Speaker(place, 0).ids(inputs)
    logits = logits_of(model, inputs)
    if logits is None or logits.shape[:2] != ids.shape or int(ids.max()) >= logits.shape[-1]:
        return None
    speaker = Speaker(place, logits.shape[-1])
    return speaker if _is_causal(model, inputs, speaker, logits) else None


def _ids_place(model: nn.Module, inputs: Inputs) -> str | int | None:
    args, kwargs = inputs
    names = list(inspect.signature(model.forward).parameters)
    for index, value in enumerate(args):
        name = names[index] if index < len(names) else ""
        if _are_ids(value) and (index == 0 or name in IDS):
            return index
    return next((name for name in IDS if _are_ids(kwargs.get(name))), None)


def _are_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.dim() == 2 and value.shape[1] > 1


def _is_causal(model: nn.Module, inputs: Inputs, speaker: Speaker, logits: torch.Tensor) -> bool:
    """Whether the last id leaves the earlier places alone, and changes its own."""
    ids = speaker.ids(inputs).clone()
    ids[:, -1] = (ids[:, -1] + 1) % speaker.vocabulary
    other = logits_of(model, speaker.with_ids(inputs, ids))
    if other is None:
        return False
    limit = TRUST.get(logits.dtype, TRUST_FLOAT) * float(logits.double().abs().max())
    early = float((other[:, :-1].double() - logits[:, :-1].double()).abs().max())
    return early <= limit and not torch.equal(other[:, -1], logits[:, -1])


def logits_of(function: Callable[..., Any], inputs: Inputs) -> torch.Tensor | None:
    """The first floating [B, S, words] tensor that a call returns, copied."""
    args, kwargs = copied(inputs)
    with torch.no_grad():
        result = function(*args, **kwargs)
    found = (value for _, value in leaves(result) if isinstance(value, torch.Tensor))
    return next((value.clone() for value in found if value.is_floating_point() and value.dim() == 3), None)


def agreement(ours: Callable[..., Any], model: nn.Module, inputs: Inputs, *, given: bool) -> TextAgreement | None:
    """How the optimised model reads as many texts as make STEPS steps, or None when the model is no language model.

    `given` says that the ids are the user's own text, which is read first; otherwise, and after it, texts are drawn.
    """
    with restored(model):
        speaker = speaker_of(model, inputs)
        if speaker is None:
            return None
        total, dtype = _Total(), torch.float32
        for number in range(STEPS):
            ids = speaker.ids(inputs)
            text = ids if given and number == 0 else _drawn(model, inputs, speaker, number)
            asked = speaker.with_ids(inputs, text)
            eager, mine = logits_of(model, asked), logits_of(ours, asked)
            if eager is None or mine is None or eager.shape != mine.shape:
                return TextAgreement(0, 0, math.inf, math.inf, ok=False)
            total.add(text, eager, mine)
            dtype = eager.dtype
            if total.steps >= STEPS:
                break
    return total.result(dtype)


def _drawn(model: nn.Module, inputs: Inputs, speaker: Speaker, number: int) -> torch.Tensor:
    like = speaker.ids(inputs)
    generator = torch.Generator().manual_seed(SEED + number)
    ids = torch.randint(0, int(like.max()) + 1, like.shape, generator=generator).to(like.device)
    for _ in range(SWEEPS):
        logits = logits_of(model, speaker.with_ids(inputs, ids))
        assert logits is not None, "speaker_of has seen logits"
        chances = torch.softmax(logits[:, :-1].double().cpu(), -1).flatten(0, 1)
        drawn = torch.multinomial(chances, 1, generator=generator).view(ids.shape[0], -1)
        ids = torch.cat((ids[:, :1], drawn.to(ids.device)), 1)
    return ids


class _Total:
    """Sums over texts."""

    def __init__(self) -> None:
        self.steps = self.predicted = self.differing = self.wrong = 0
        self.eager = self.mine = 0.0

    def add(self, ids: torch.Tensor, eager: torch.Tensor, mine: torch.Tensor) -> None:
        """Another text and what both models made of it."""
        base, ours = eager.double(), mine.double()
        best, chosen = base.argmax(-1, keepdim=True), ours.argmax(-1, keepdim=True)
        margin = (base.gather(-1, best) - base.gather(-1, chosen)).squeeze(-1)
        tie = TRUST.get(eager.dtype, TRUST_FLOAT) * base.square().mean(-1).sqrt()
        differing = (best != chosen).squeeze(-1)
        self.steps += differing.numel()
        self.differing += int(differing.sum())
        self.wrong += int((differing & ~(margin <= tie)).sum())
        targets = ids[:, 1:].unsqueeze(-1)
        self.predicted += targets.numel()
        self.eager -= float(torch.log_softmax(base[:, :-1], -1).gather(-1, targets).sum())
        self.mine -= float(torch.log_softmax(ours[:, :-1], -1).gather(-1, targets).sum())

    def result(self, dtype: torch.dtype) -> TextAgreement:
        """What was found; right when only ties differ and the perplexity is the same."""
        eager, mine = math.exp(self.eager / self.predicted), math.exp(self.mine / self.predicted)
        limit = min(PERPLEXITY_LIMIT, TRUST.get(dtype, TRUST_FLOAT))
        ok = not self.wrong and abs(mine / eager - 1.0) <= limit
        return TextAgreement(self.steps, self.differing, eager, mine, ok=ok)

"""Language models are compared by the words they choose; other models are not."""

import pytest
import torch
from captured import load
from torch import nn

from harness.language import agreement, speaker_of


@pytest.fixture(scope="module")
def gpt2():
    loaded = load("gpt2")
    return loaded.model, (loaded.args, loaded.kwargs)


class Changed(nn.Module):
    """The model with something done to its logits."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, *args, **kwargs):
        return self.change(self.model(*args, **kwargs))


def nudged(logits):
    return logits + logits.square().mean(-1, keepdim=True).sqrt() * 1e-5 * torch.randn_like(logits)


def test_the_same_model_agrees_over_at_least_sixty_four_steps(gpt2):
    model, inputs = gpt2
    found = agreement(Changed(model, nudged), model, inputs, given=False)
    assert found.ok
    assert found.steps >= 64
    assert found.top1 > 0.98
    assert abs(found.perplexity_change) < 5e-4


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.roll(1, -1),
        lambda logits: torch.cat((logits[:, :-1], logits[:, -1:].flip(-1)), 1),
        lambda logits: logits * 1.2,
        lambda logits: logits[:, :-1],
    ],
    ids=["other words", "one wrong place", "too sure", "too few"],
)
def test_other_words_or_another_perplexity_are_noticed(gpt2, change):
    model, inputs = gpt2
    assert not agreement(Changed(model, change), model, inputs, given=False).ok


class Tied(nn.Module):
    """Two words are always exactly as likely, and likelier than all others."""

    def __init__(self, first):
        super().__init__()
        self.table, self.first = nn.Embedding(16, 16), first

    def forward(self, ids):
        logits = self.table(ids).tanh()
        logits[..., 3], logits[..., 5] = 5.0, 5.0
        logits[..., self.first] += 1e-6
        return logits


def test_words_that_tie_may_differ():
    one, two = Tied(3), Tied(5)
    two.load_state_dict(one.state_dict())
    found = agreement(two, one, ((torch.arange(8).view(1, 8),), {}), given=True)
    assert found.ok
    assert found.top1 == 0.0


def test_text_the_user_gave_is_read_first(gpt2):
    model, inputs = gpt2
    seen = []
    ours = Changed(model, lambda logits: logits)
    ours.register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
    agreement(ours, model, inputs, given=True)
    assert torch.equal(seen[0], inputs[0][0])


def test_an_encoder_and_a_convolutional_net_are_no_language_models():
    for name in ("bert", "convnet"):
        loaded = load(name)
        assert speaker_of(loaded.model, (loaded.args, loaded.kwargs)) is None

"""Inputs that nobody gave come from the configuration, and the model runs on them."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import zoo_cases

from harness.derived_inputs import derive_inputs
from harness.errors import InputError
from harness.index_check import CheckedIndices

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LLaMA", {"input_ids": (1, 128)}),
        ("RoBERTa", {"input_ids": (1, 126)}),  # two of its 128 places are the padding id's
        ("XLNet", {"input_ids": (1, 128)}),  # its configuration says -1 positions
        ("T5", {"input_ids": (1, 128), "decoder_input_ids": (1, 64)}),
        ("Whisper", {"input_features": (1, 16, 64), "decoder_input_ids": (1, 32)}),
        ("Wav2Vec2", {"input_values": (1, 4096)}),
        ("ResNet", {"pixel_values": (1, 3, 64, 64)}),
        ("CLIP", {"input_ids": (1, 128), "pixel_values": (1, 3, 32, 32)}),
    ],
)
def test_a_transformers_model_runs_on_what_its_configuration_says(name, expected):
    pytest.importorskip("transformers")
    model = zoo_cases.build(next(each for each in zoo_cases.ARCHITECTURES if each.name == name))
    inputs = derive_inputs(model, CPU, torch.float32)
    assert not inputs.args
    assert {key: tuple(value.shape) for key, value in inputs.kwargs.items()} == expected
    with torch.no_grad(), CheckedIndices():
        model(**inputs.kwargs)


class TwoThings(nn.Module):
    def forward(self, x, y):
        return x + y


def test_what_cannot_be_told_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"forward\(x, y\) takes; give --inputs"):
        derive_inputs(TwoThings(), CPU, torch.float32)

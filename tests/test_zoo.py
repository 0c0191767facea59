"""The zoo: models of every kind are captured, ranked, spliced and equal to eager. A sample by default, all if slow."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import zoo

SAMPLE = ("LLaMA", "BERT", "GPT-2", "ViT", "ConvNeXt", "InPlace", "SeveralInputs", "Dropout")
NOT_CAPTURED = {"Recurrent": "LSTM"}  # what the table says of them
SLOWEST = {"Mamba", "Mamba 2", "RWKV", "RecurrentGemma", "Funnel", "MobileNetV2"}  # minutes each: `benchmarks/zoo.py`
CASES = {case.name: case for case in zoo.cases()}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_with_its_kernels_is_the_model(name):
    pytest.importorskip("transformers")
    row = zoo.run(CASES[name], second_size=False)
    assert row.verified, row.problem
    assert row.spliced
    assert row.ranking
    covered = row.covered + sum(share for share, _ in row.uncovered)
    assert covered == pytest.approx(1.0), "what is not covered has a reason"
    assert all(reason.strip(": ") for _, reason in row.uncovered)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(set(CASES) - SLOWEST - set(NOT_CAPTURED)))
def test_a_model_with_its_kernels_is_the_model_at_a_second_size_too(name):
    pytest.importorskip("transformers")
    row = zoo.run(CASES[name])
    assert row.verified, row.problem


@pytest.mark.parametrize(("name", "said"), NOT_CAPTURED.items())
def test_what_cannot_be_captured_says_why(name, said):
    with pytest.raises(Exception, match=said):
        zoo.run(CASES[name])

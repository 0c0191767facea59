"""The example models: they build without arguments, run in every dtype, and no output is trivially small."""

import pytest
import torch
from captured import CLASSES, MODELS, SMALL, load

from harness.loading import load_model
from harness.records import ModelSpec


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_example_model_runs_in_every_dtype_with_outputs_of_ordinary_size(name, dtype):
    output = load(name, dtype)()
    assert output.dtype is getattr(torch, dtype)
    assert torch.isfinite(output).all()
    assert 0.05 < output.float().std() < 20


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_model_builds_without_arguments(name):
    loaded = load_model(ModelSpec(f"{MODELS / name}.py:{CLASSES[name]}", device="cpu"))
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) > 100_000


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_seed_gives_the_same_model(name):
    assert torch.equal(load(name)(), load(name)())


def test_half_precision_keeps_the_complex_rotations_of_the_llama():
    loaded = load("llama", "float16")
    assert loaded.model.rotations.dtype is torch.complex64
    assert loaded.model.half().rotations.is_complex()


def test_written_out_attention_of_the_gpt2_agrees_with_the_fused_one():
    loaded = load("gpt2")
    attention = loaded.model.h[0].attn
    x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0))
    queries, keys, values = (part.view(2, 10, 4, 16).transpose(1, 2) for part in attention.c_attn(x).split(64, dim=2))
    fused = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    expected = attention.c_proj(fused.transpose(1, 2).reshape(2, 10, 64))
    assert torch.allclose(attention(x), expected, atol=1e-5)


def test_sizes_come_from_the_command_line():
    arguments = {**SMALL["llama"], "layers": "1", "hidden": "96"}
    loaded = load_model(ModelSpec(f"{MODELS}/llama.py:LLaMA", model_args=arguments, device="cpu"))
    assert len(loaded.model.layers) == 1
    assert loaded.model.layers[0].feed_forward.w1.out_features == 96

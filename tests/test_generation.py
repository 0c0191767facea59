"""`generate` under an optimised model: the same words as the original's, with every cache, and every site counted."""

import pytest
import torch
from identity import identity_kernels

from harness.optimized import optimize

transformers = pytest.importorskip("transformers")


@pytest.fixture
def llama():
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (1, 8))
    return model, ids, optimize(model, identity_kernels(model, (), {"input_ids": ids, "use_cache": False}))


@pytest.mark.parametrize(
    "cache", [{}, pytest.param({"cache_implementation": "static"}, marks=pytest.mark.slow)], ids=["growing", "static"]
)
def test_generated_words_are_the_originals_and_unseen_sizes_are_counted(llama, cache):
    model, ids, optimized = llama
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, **cache)
    before = sum(optimized.calls().values())
    found = optimized.generate(ids, max_new_tokens=6, do_sample=False, **cache)
    assert torch.equal(found, expected)
    assert sum(optimized.calls().values()) > before, "the prompt has the verified size and runs the kernels"
    assert sum(optimized.sites.fallback.values()) > 0, "a single new word has not"
    assert any("not verified" in reason for reason in optimized.sites.reasons)


def test_generating_leaves_the_original_as_it_was(llama):
    model, _, optimized = llama
    assert "forward" not in vars(model)
    assert optimized.generate.__self__.lm_head.weight is model.lm_head.weight

"""What is found in a graph: the regions people expect, equal across layers, and never an unsafe one."""

import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from captured import capture_of, captured, drafts, sites_by_kind
from torch import nn

from harness.partition import Family
from harness.regions import match, structural_key
from harness.targets import draft_targets, finish


def regions_of(model, *args):
    found = capture_of(model, *args)
    return [region for graph in found.graphs for region in graph.regions]


def light(regions):
    return [region for region in regions if region.family is Family.LIGHT]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_llama_gives_norms_gates_and_rotations_equal_across_its_layers(dtype):
    kinds = sites_by_kind(drafts("llama", dtype))
    assert kinds["rmsnorm"] == [1]  # the first has no addition before it
    assert kinds["add_rmsnorm"] == [5, 1]  # the last returns no residual
    assert kinds["silu_mul"] == [3]
    assert kinds["rope_complex"] == [3, 3]  # queries, and fewer heads of keys
    assert kinds["attention"] == [3]


def test_written_out_attention_is_one_region_with_its_repeated_keys_and_casts():
    attention = next(draft for draft in drafts("llama", "float16") if draft.kind == "attention")
    assert attention.written.inputs == ("q", "k", "v", "mask")
    steps = [node.op for node in attention.written.graph]
    assert steps.count("matmul") == 2
    assert {"softmax", "expand", "to"} <= set(steps)


def test_a_gpt2_gives_gelu_and_layer_norms():
    kinds = sites_by_kind(drafts("gpt2"))
    assert kinds["gelu"] == [2]
    assert kinds["attention"] == [2]
    assert sum(kinds["add_layernorm"]) == 5


def test_a_bert_and_a_convnet_give_their_own():
    assert sites_by_kind(drafts("bert"))["attention"] == [2]
    assert sum(sites_by_kind(drafts("convnet"))["groupnorm_silu"]) >= 4


def test_a_transformers_llama_gives_the_same_kinds_over_three_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    kinds = sites_by_kind(draft_targets(capture_of(model, torch.randint(0, 128, (1, 16)))))
    assert kinds["add_rmsnorm"] == [5, 1]
    assert kinds["silu_mul"] == [3]
    assert kinds["rope_half"] == [3, 3]


def test_regions_are_disjoint_and_read_from_outside_only_through_outputs():
    for graph in captured("llama").graphs:
        owner = {}
        for region in graph.regions:
            for node in region.nodes:
                assert node not in owner
                owner[node] = region
        for region in graph.regions:
            for node in region.nodes:
                leaks = any(owner.get(user) is not region for user in node.users)
                assert not leaks or node in region.outputs


class Differing(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.mix(self.first(self.mix(x))))


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) * 2.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: F.softmax(x, dim=-1), lambda x: F.softmax(x, dim=-2)),
        (lambda x: F.layer_norm(x, (8,), eps=1e-5), lambda x: F.layer_norm(x, (8,), eps=1e-6)),
        (lambda x: x.relu() + 1.0, lambda x: x.relu() + 1.5),
        (lambda x: x.relu() + 1, lambda x: x.relu() + 1.0),
        (lambda x: x.relu(), lambda x: x.transpose(1, 2).relu().transpose(1, 2)),
        (lambda x: x.sum(-1, keepdim=True) * x, lambda x: x.sum(-2, keepdim=True) * x),
    ],
    ids=["dim", "eps", "constant", "type of constant", "stride", "reduced dim"],
)
def test_regions_that_differ_only_a_little_are_different_targets(one, other):
    model = Differing(Scaled(one), Scaled(other))
    found = light(regions_of(model, torch.randn(2, 8, 8)))
    assert len({structural_key(region) for region in found}) == len(found) == 2


def test_equal_regions_are_one_target():
    model = Differing(Scaled(torch.relu), Scaled(torch.relu))
    found = light(regions_of(model, torch.randn(2, 8, 8)))
    assert len({structural_key(region) for region in found}) == 1


class WritesThroughView(nn.Module):
    def forward(self, x):
        y = x * 2.0
        z = y[:, :2]
        before = y + 1.0
        z.add_(5.0)
        return before.relu() * 3.0 + y


class Draws(nn.Module):
    def forward(self, x):
        return F.dropout(x * 2.0, 0.5, training=True) + 1.0


class ReturnsViews(nn.Module):
    def forward(self, x):
        y = x.relu() + 1.0
        return y, y.view(-1), x.view(-1)


class LeavesAndReturns(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        y = x.relu() + 1.0
        return self.mix(y).sigmoid() + y.tanh()


def test_nothing_that_touches_mutated_memory_is_in_a_region():
    for region in regions_of(WritesThroughView(), torch.randn(4, 4)):
        names = {node.name for node in (*region.nodes, *region.inputs)}
        assert not names & {"y", "z", "add_"}
        assert not any(region.facts.storages[node] & region.facts.mutated for node in region.nodes)


def test_a_random_operation_is_in_no_region():
    regions = regions_of(Draws(), torch.randn(4, 4))
    assert not any("dropout" in node.name for region in regions for node in region.nodes)


def test_no_output_of_a_region_shares_memory_with_an_input_or_another_output():
    for region in regions_of(ReturnsViews(), torch.randn(4, 4)):
        seen = [region.facts.storages[node] for node in region.inputs]
        for output in region.outputs:
            assert not any(region.facts.storages[output] & other for other in seen)
            seen.append(region.facts.storages[output])


def test_a_region_is_convex():
    regions = regions_of(LeavesAndReturns(), torch.randn(4, 8))
    for region in regions:
        inside, reached, pending = set(region.nodes), set(), [u for n in region.outputs for u in n.users]
        while pending:
            node = pending.pop()
            if node not in inside and node not in reached:
                reached.add(node)
                pending.extend(node.users)
        assert not reached & set(region.inputs)


def test_halves_of_one_tensor_come_in_as_that_tensor():
    class Gated(nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

    (region,) = regions_of(Gated(), torch.randn(2, 3, 8))
    assert [tuple(region.facts.values[node].shape) for node in region.inputs] == [(2, 3, 8)]


def test_a_target_matches_the_same_region_at_another_size_and_no_other_region():
    found = captured("llama")
    targets = [finish(draft, {}) for draft in drafts("llama")]
    for graph in found.others[0]:
        for region in graph.regions:
            hits = [target.id for target in targets if match(target, region) is not None]
            assert len(hits) == 1, (region.module, hits)
    norm = next(target for target in targets if target.kind == "add_rmsnorm")
    sizes = [match(norm, region) for region in found.others[0][0].regions]
    assert {"B": 2, "S": 17} in [dict(size) for size in sizes if size is not None]


def test_the_sizes_a_target_was_captured_at_are_its_bindings():
    norm = next(finish(draft, {}) for draft in drafts("llama") if draft.kind == "add_rmsnorm")
    assert norm.inputs[0].dims == ("B", "S", 64)
    assert [dict(binding) for binding in norm.bindings] == [{"B": 1, "S": 24}, {"B": 2, "S": 17}, {"B": 3, "S": 31}]


@pytest.mark.slow
def test_sixty_four_layers_are_partitioned_and_hashed_within_the_budget():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(64))
            self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(64))
            self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(64))

        def forward(self, x):
            for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
                gate, value = up(norm(x)).chunk(2, dim=-1)
                x = x + down(F.silu(gate) * value)
            return x

    graph = capture_of(Deep(), torch.randn(2, 4, 8)).graphs[0]
    from harness.partition import groups_of

    start = time.perf_counter()
    groups_of(graph.module.graph, graph.regions[0].facts)
    keys = {structural_key(region) for region in graph.regions}
    assert time.perf_counter() - start < 5.0
    assert len(keys) < 12

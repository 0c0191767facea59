"""What may be in no region is found and named; in-place writes to a graph's own memory are no obstacle."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from captured import capture_of_trained
from identity import identity_kernels
from torch import nn

from harness.kernel_op import Kernel
from harness.optimized import optimize
from harness.partition import Family
from harness.soundness import check
from harness.symbols import symbolise
from harness.targets import draft_targets, finish


@torch.library.custom_op("overnight_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


class Runs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.function(self, x)


def left_out_of(function, *, train=False):
    graph = capture_of_trained(Runs(function).train(train), torch.randn(4, 8)).graphs[0]
    return {node.name: left.reason for left in graph.left_out for node in left.nodes}, graph


def trained(model, x):
    return F.batch_norm(x + 1, model.norm.running_mean, model.norm.running_var, training=True).relu() * 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda _, x: torch.vmap(lambda row: (row - row.mean()).tanh())(x + 1), "functorch"),
        (lambda _, x: doubled(x + 1).relu(), "overnight_tests::doubled"),
        (trained, "in place"),
        (lambda _, x: x.relu() + torch.rand_like(x), "random"),
        (lambda _, x: x.add_(1).relu(), "in place"),
    ],
    ids=["vmap", "custom operator", "running statistics", "random", "input"],
)
def test_what_no_region_may_hold_is_named_with_the_reason(function, said):
    reasons, graph = left_out_of(function)
    assert any(said in reason for reason in reasons.values()), reasons
    inside = {node.name for region in graph.regions for node in region.nodes}
    assert inside.isdisjoint(reasons)


def test_every_operation_is_in_one_region_or_named_as_left_out():
    reasons, graph = left_out_of(lambda _, x: (x.add_(1).relu() * 2).sum() + torch.rand(8).tanh())
    inside = {node.name for region in graph.regions for node in region.nodes}
    operations = {node.name for node in graph.module.graph.nodes if node.op in ("call_function", "call_method")}
    assert operations == inside | set(reasons)


def chained(_, x):
    y = x * 2 + 1
    y.relu_().add_(x)
    y *= 0.5
    return F.relu(torch.sigmoid(y) * y, inplace=True).clamp_(max=0.4)


def test_writes_to_a_models_own_intermediates_end_in_one_region():
    reasons, graph = left_out_of(chained)
    assert not reasons
    assert len(graph.regions) == 1


def reads_a_view_later(_, x):
    y = x * 2 + 1
    half = y[:, :4]
    y.mul_(3)
    return half.tanh() + 1


def promotes(_, x):
    y = (x > 0).long() + 1
    y += 1
    z = x.half() * 2
    z.mul_(x)
    return z, y.float()


def writes_a_view(_, x):
    y = x * 2 + 1
    y[:, :4].relu_()
    return y.tanh() + 1


@pytest.mark.parametrize("function", [chained, reads_a_view_later, promotes, writes_a_view])
def test_models_that_write_to_their_own_memory_stay_what_they_are(function):
    model = Runs(function).eval()
    x = torch.randn(4, 8)
    optimized = optimize(model, identity_kernels(model, (x,)))
    difference = check(optimized, model, ((x,), {}))
    assert difference.ok, difference.detail


def test_running_statistics_updated_in_training_advance_as_in_eager():
    model = Runs(lambda m, x: (m.norm(x.sigmoid() * 2) + m.norm.running_mean * 3).tanh()).train()
    x = torch.randn(4, 8)
    optimized = optimize(model, identity_kernels(model, (x,)))
    difference = check(optimized, model, ((x,), {}))
    assert difference.ok, difference.detail


def test_capturing_leaves_buffers_inputs_and_random_generators_alone():
    def function(model, x):
        x.add_(1)
        return model.norm(F.dropout(x, 0.5))

    model, x = Runs(function).train(), torch.randn(4, 8)
    before, state = (x.clone(), model.norm.running_mean.clone()), torch.get_rng_state()
    found = capture_of_trained(model, x)
    assert torch.equal(x, before[0])
    assert torch.equal(model.norm.running_mean, before[1])
    assert torch.equal(torch.get_rng_state(), state)
    given = [value for value in found.graphs[0].calls[0] if value.shape == x.shape]
    assert torch.equal(given[0], before[0]), "a call is kept as it was made"


def test_operations_that_nothing_reads_are_in_no_region():
    def function(_, x):
        y = x.relu() + 1
        (y * 3).tanh()
        return y.sigmoid()

    reasons, graph = left_out_of(function)
    assert not reasons
    assert [node.name for node in graph.regions[0].nodes][-1].startswith("sigmoid")
    assert not any("tanh" in node.name for node in graph.module.graph.nodes)


def test_a_logical_and_is_no_write():
    model = Runs(lambda _, x: ((x > 0) & (x < 1)).float() * x).eval()
    x = torch.randn(4, 8)
    optimized = optimize(model, identity_kernels(model, (x,)))
    assert check(optimized, model, ((x,), {})).ok
    assert sum(optimized.sites.applied.values()) == 1
    assert not optimized.sites.reasons


def autocast_in_between(_, x):
    gate = torch.sigmoid(x)
    early = gate @ x.t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        late = x @ x.t()
    return early, gate * late.float()[:, :1]


def test_nothing_moves_across_a_change_of_context():
    model = Runs(autocast_in_between).eval()
    x = torch.randn(4, 8)
    optimized = optimize(model, identity_kernels(model, (x,)))
    difference = check(optimized, model, ((x,), {}))
    assert difference.ok, difference.detail


def test_sizes_that_change_the_rank_of_an_input_give_no_common_pattern():
    def pattern(*sizes):
        return {"inputs": [["float32", list(sizes), [1] * len(sizes)]], "nodes": [], "outputs": []}

    assert symbolise([pattern(4, 8), pattern(4, 2, 8)], {}) is None


class TableAndBatch(nn.Module):
    """Two additions that look alike at a batch of one."""

    def __init__(self):
        super().__init__()
        self.table = Runs(lambda _, x: torch.tanh(x + x[:1]) * 2)
        self.both = Runs(lambda _, x: torch.tanh(x + x.flip(0)) * 2)
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return self.both(self.mix(self.table(x)))


def test_a_site_runs_the_kernel_of_the_target_that_was_captured_there():
    model, x = TableAndBatch().eval(), torch.randn(1, 12, 8)
    found = capture_of_trained(model, x)
    drafts = [draft for draft in draft_targets(found) if draft.region.family is Family.LIGHT]
    kernels = [
        Kernel(t, t.reference.replace("def reference(", "def kernel_fn(")) for t in (finish(d, {}) for d in drafts)
    ]
    optimized = optimize(model, kernels)
    assert check(optimized, model, ((x,), {})).ok
    assert all(optimized.sites.applied[kernel.target.id] == len(kernel.target.call_sites) for kernel in kernels)
    assert len(kernels) >= 2

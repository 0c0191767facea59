"""Fusions beside the disjoint cover: what they are made of, their references, and what they do in a model."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from agent.json_reports import profile_json
from agent.proposers.playbook import known, library
from agent.proposers.playbook.playbook import kernels_folder
from agent.records import Brief
from harness.capture import capture
from harness.kernel_op import Kernel
from harness.loading import LoadedModel
from harness.measured import Measured
from harness.optimized import optimize
from harness.profiling import Bill, assemble
from harness.targets import draft_fusions, draft_targets, finish, observe
from harness.verify import verify_model


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate, self.wide = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.narrow = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.narrow(F.silu(self.gate(x)) * self.wide(x))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x, cos, sin):
        q, k = self.queries(x), self.keys(x)

        def turned(value):
            half = value.shape[-1] // 2
            return value * cos + torch.cat((-value[..., half:], value[..., :half]), dim=-1) * sin

        return turned(q) @ turned(k).transpose(1, 2) * 0.25


class ReadTwice(nn.Module):
    """The linear's result is also an output: its GELU cannot swallow it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)

    def forward(self, x):
        y = self.up(x)
        return F.gelu(y), y


def loaded(model, *inputs):
    model = model.eval().requires_grad_(requires_grad=False)
    return LoadedModel(model, inputs, {}, type(model).__name__, "cpu", torch.float32)


def drafted(subject):
    """The capture of a model, and its drafts: cover and fusions, observed."""
    found = capture(subject)
    cover = draft_targets(found)
    fusions = draft_fusions(found, cover)
    observe(found, [*cover, *fusions])
    return found, cover, fusions


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    subject = loaded(Layers(), torch.randn(2, 16, 32))
    return subject, *drafted(subject)


def test_products_and_their_neighbours_are_offered_with_their_members(layers):
    _, _, cover, fusions = layers
    assert {draft.kind: draft.members for draft in fusions if draft.kind != "linear_add"} == {
        "fused_layernorm__linear": ("layernorm_1", "linear_1"),
        "linear_gelu": ("linear_1", "gelu_1"),
        "linear_silu_mul": ("linear_3", "linear_3", "silu_mul_1"),
        "gated_mlp": ("linear_3", "linear_3", "silu_mul_1", "linear_4"),
    }
    assert sorted(draft.members for draft in fusions if draft.kind == "linear_add") == [
        ("linear_2", "add_1"),
        ("linear_4", "add_1"),
    ]
    assert not {draft.id for draft in cover} & {draft.id for draft in fusions}


def test_references_of_fusions_reproduce_the_captured_outputs(layers):
    _, _, _, fusions = layers
    assert [draft.mismatch for draft in fusions] == [""] * len(fusions)
    assert all(len(draft.symbols.bindings()) > 1 for draft in fusions)


@pytest.mark.parametrize(
    ("model", "inputs", "kind"),
    [
        (Pictures, [(2, 3, 16, 16)], "conv"),
        (Rotated, [(2, 8, 32), (8, 32), (8, 32)], "linear_rope_half"),
        (Rotated, [(2, 8, 32), (8, 32), (8, 32)], "matmul_pointwise"),
    ],
)
def test_convolutions_turned_queries_and_scaled_products_are_fused_with_what_reads_them(model, inputs, kind):
    torch.manual_seed(0)
    _, _, fusions = drafted(loaded(model(), *(torch.randn(shape) for shape in inputs)))
    found = [draft for draft in fusions if draft.kind.startswith(kind)]
    assert found, [draft.kind for draft in fusions]
    assert not found[0].mismatch


def test_what_is_read_elsewhere_too_is_not_swallowed():
    _, _, fusions = drafted(loaded(ReadTwice(), torch.randn(2, 16, 32)))
    assert not fusions


def test_shares_of_the_cover_sum_to_one_at_most_and_fusions_are_nested_under_it(layers):
    subject, found, cover, fusions = layers
    spent = {id(region): 10.0 for draft in cover for _, region in draft.sites}
    bill = Bill(regions=spent)
    measured = Measured("compile", sum(spent.values()) / 1e3, {}, (), ())
    report, _ = assemble(
        subject, found, [*cover, *fusions], measured, bill, {"copy_bytes_per_s": 1e10, "matmul_float32_flops": 1e11}
    )
    data = profile_json(report)
    assert sum(target["share"] for target in data["targets"]) == pytest.approx(1.0)
    nested = {fusion["id"]: fusion for target in data["targets"] for fusion in target["fusions"]}
    assert set(nested) == {draft.id for draft in fusions}
    assert nested["gated_mlp_1"]["share"] == pytest.approx(0.4)
    assert nested["gated_mlp_1"]["members"] == ["linear_3", "linear_3", "silu_mul_1", "linear_4"]
    wanted = {"id", "kind", "call_sites", "share", "time_us", "floor_us", "flops", "bytes", "model_gain"}
    assert all(wanted <= set(target) for target in [*data["targets"], *nested.values()])


def kernels(drafts, *ids):
    chosen = [draft for draft in drafts if draft.id in ids]
    targets = [finish(draft, {0: 1}) for draft in chosen]
    return [Kernel(target, target.reference.replace("def reference", "def kernel_fn")) for target in targets]


def test_a_fusion_takes_the_place_of_its_members_and_the_others_stay(layers):
    subject, _, cover, fusions = layers
    chosen = kernels([*cover, *fusions], "gated_mlp_1", "linear_gelu_1", "gelu_1", "linear_4", "layernorm_1")
    ours = optimize(subject.model, chosen, under_compile=False)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(*subject.args), subject.model(*subject.args))
    assert ours.sites.applied == {"gated_mlp_1": 1, "linear_gelu_1": 1, "layernorm_1": 1}


def test_a_fusion_that_is_not_kept_changes_nothing_for_its_members(layers):
    subject, _, cover, _ = layers
    ours = optimize(subject.model, kernels(cover, "linear_3", "gelu_1"), under_compile=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(*subject.args), subject.model(*subject.args))
    assert ours.sites.applied == {"linear_3": 2, "gelu_1": 1}


def brief(draft, device="cpu"):
    return Brief(finish(draft, {0: 1}), device, device, {}, None, None, (), "")


def test_the_playbook_has_a_kernel_for_a_gated_mlp_that_computes_it(layers):
    _, _, _, fusions = layers
    draft = next(draft for draft in fusions if draft.kind == "gated_mlp")
    (idea,) = known.ideas(brief(draft), kernels_folder())
    assert idea.tactic == "known cpp fused_mlp"
    space = {}
    exec(compile(idea.source, "kernel", "exec"), space)
    reference = {}
    exec(compile(draft.written.source, "reference", "exec"), reference)
    inputs = draft.samples[0]
    torch.testing.assert_close(space["kernel_fn"](*inputs), reference["reference"](*inputs), rtol=1e-5, atol=1e-6)


def test_the_playbook_has_kernels_for_linear_and_gelu_on_a_gpu(layers):
    _, _, _, fusions = layers
    draft = next(draft for draft in fusions if draft.kind == "linear_gelu")
    (idea,) = known.ideas(brief(draft, "cuda"), kernels_folder())
    assert idea.tactic == "known triton linear_gelu"
    assert 'return known_kernel(x, weight, bias, "none")' in idea.source
    assert not list(library.ideas(brief(draft, "cuda")))  # the library's epilogue has the tanh form alone


def test_verify_counts_and_bisects_keeps_that_overlap(layers):
    subject, _, cover, fusions = layers
    (fused,) = [draft for draft in fusions if draft.members == ("linear_2", "add_1")]
    right = kernels([*cover, *fusions], fused.id, "add_1")
    report = verify_model(subject, right, lambda *_: None, modes=("overnight",), budget_s=0.05)
    assert report.outputs_ok, report.detail
    assert report.applied == {fused.id: 1, "add_1": 1}  # the sum that the fusion takes over is no fallback
    assert report.sites.fallback == 0
    wrong = [
        Kernel(each.target, each.source.replace("return ", "return 1.01 * ")) if each.target.members else each
        for each in right
    ]
    report = verify_model(subject, wrong, lambda *_: None, modes=("overnight",), bisect=True, budget_s=0.05)
    assert not report.outputs_ok
    assert report.suspects == (fused.id,)

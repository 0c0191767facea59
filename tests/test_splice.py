"""Kernels spliced into models: outputs, buffers and inputs stay the original's, and every site is counted."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from identity import identity_kernels
from torch import nn

from harness.errors import InputError
from harness.kernel_op import Kernel, build_op
from harness.optimized import Optimized, held_tensors, optimize, owned
from harness.outputs import like_original
from harness.records import Role
from harness.soundness import check

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def spliced(model, args=(), kwargs=None) -> Optimized:
    """The model with every region replaced, checked on two consecutive calls."""
    optimized = optimize(model.eval(), identity_kernels(model, args, kwargs))
    difference = check(optimized, model, (args, kwargs or {}))
    assert difference.ok, difference.detail
    assert difference.max_error < 1e-4
    return optimized


def applied(optimized: Optimized) -> int:
    return sum(optimized.sites.applied.values())


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = nn.functional.silu(x) * 2 + 1
        self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        self.steps += 1
        return torch.tanh(hidden - self.mean) * self.steps


def test_a_buffer_updated_in_forward_advances_as_in_eager():
    optimized = spliced(RunningMean(), (torch.randn(4, 8),))
    assert applied(optimized) > 0


class WritesThroughViews(nn.Module):
    def forward(self, x):
        base = torch.sigmoid(x) * 3 - 1
        window = base[:, 1:5]
        window.mul_(2)
        early = torch.tanh(base) + 1
        base.t()[0].add_(10)
        late = torch.exp(-base.abs()) * early
        window[:, 0] = 7
        return early, late, base


def test_writes_through_views_are_seen_by_what_comes_after_and_by_nothing_before():
    spliced(WritesThroughViews(), (torch.randn(4, 8),))


class WritesToItsInput(nn.Module):
    def forward(self, x):
        doubled = torch.relu(x) * 2 + x
        x.add_(1)
        return doubled, torch.sigmoid(x) * doubled


def test_an_input_written_in_place_ends_as_in_eager():
    spliced(WritesToItsInput(), (torch.randn(4, 8),))


class ReturnsViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        hidden = nn.functional.gelu(x * self.scale) + 1
        return x.view(-1), x, hidden, hidden.t(), hidden[:2], self.scale.view(2, 4)


def test_outputs_that_are_views_of_inputs_and_of_each_other_keep_sharing_memory():
    model, x = ReturnsViews(), torch.randn(4, 8)
    optimized = spliced(model, (x,))
    with torch.no_grad():
        flat, same, hidden, turned, _, scale = optimized(x)
    assert flat.data_ptr() == x.data_ptr()
    assert same.data_ptr() == x.data_ptr()
    assert turned.data_ptr() == hidden.data_ptr()
    assert scale.data_ptr() == model.scale.data_ptr()


@dataclass
class Answer:
    logits: torch.Tensor
    extra: dict[str, torch.Tensor]


class Structured(nn.Module):
    def forward(self, x, *, gate, flag=True, other=None):
        mixed = nn.functional.silu(gate) * x
        chosen = mixed + 1 if flag else mixed - 1
        return {"answer": (mixed, [chosen, None, 3]), "again": torch.softmax(chosen, -1), "text": "kept"}


def test_keyword_inputs_and_nested_outputs_come_back_in_their_structure():
    optimized = spliced(Structured(), (torch.randn(4, 8),), {"gate": torch.randn(4, 8)})
    assert applied(optimized) > 0


class BreaksTheGraph(nn.Module):
    def forward(self, x):
        first = torch.sigmoid(x) * 2
        torch._dynamo.graph_break()
        second = nn.functional.silu(first) * x
        return second.square() + first


def test_every_graph_of_a_broken_capture_is_spliced():
    optimized = spliced(BreaksTheGraph(), (torch.randn(4, 8),))
    assert optimized.sites.graphs == 2
    assert applied(optimized) >= 2


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, residual):
        summed = x + residual
        normed = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.first(normed) + self.second(normed) * self.third(summed), summed.sum()


def test_a_region_with_two_outputs_serves_all_their_users():
    model = TwoOutputs()
    kernels = identity_kernels(model, (torch.randn(4, 8), torch.randn(4, 8)))
    assert any(len(kernel.target.outputs) > 1 for kernel in kernels)
    spliced(model, (torch.randn(4, 8), torch.randn(4, 8)))


class ReadsStrided(nn.Module):
    def forward(self, x, y):
        return torch.tanh(x.t() * 2) + y, torch.softmax(x[:, ::2] * 3, -1), nn.functional.silu(y.expand(8, 8)) * 2


def test_strided_inputs_and_views_inside_reach_the_kernel_with_their_strides():
    wide = torch.randn(8, 16)[:, ::2]
    column = torch.randn(1, 8)
    optimized = spliced(ReadsStrided(), (wide, column))
    assert applied(optimized) > 0


class EarlyUserLateInput(nn.Module):
    def __init__(self, write: bool):
        super().__init__()
        self.a, self.b, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x):
        gate = torch.sigmoid(x)
        early = self.a(gate)
        if self.write:
            early.add_(1)
        late = self.b(x)
        return early, torch.maximum(gate, late)


def whole_gate(module):
    """The region {sigmoid, maximum}: its first output is read before its second input exists."""
    nodes = {str(getattr(node.target, "__name__", node.target)): node for node in module.graph.nodes}
    late = next(node for node in nodes["maximum"].all_input_nodes if node is not nodes["sigmoid"])
    inside = (nodes["sigmoid"], nodes["maximum"])
    return [SimpleNamespace(nodes=inside, inputs=(nodes["sigmoid"].args[0], late), outputs=inside)]


GATE = "import torch\n\ndef {}(x, late):\n    gate = torch.sigmoid(x)\n    return gate, torch.maximum(gate, late)\n"


@pytest.mark.parametrize("write", [False, True])
def test_an_early_user_moves_behind_the_kernel_unless_something_in_between_writes(write):
    model, x = EarlyUserLateInput(write).eval(), torch.randn(4, 8)
    some = silu_kernel(SiluUp(), PLAIN, x).target
    inputs = tuple(replace(spec, shape=(4, 8), stride=(8, 1), dims=(4, 8)) for spec in some.inputs)
    target = replace(some, inputs=inputs, outputs=inputs, reference=GATE.format("reference"))
    kernel = Kernel(target, GATE.format("kernel_fn"))
    optimized = optimize(model, [kernel], find=whole_gate, match=lambda _target, _region: {})
    difference = check(optimized, model, ((x,), {}))
    assert difference.ok, difference.detail
    assert applied(optimized) == (0 if write else 1)
    assert bool(optimized.sites.fallback) == write


class SiluUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x):
        return nn.functional.silu(self.gate(x)) * self.up(x)


def silu_kernel(model: nn.Module, source: str, x: torch.Tensor) -> Kernel:
    light = [kernel for kernel in identity_kernels(model, (x,)) if kernel.target.kind == "light"]
    assert len(light) == 1
    return Kernel(light[0].target, source)


PLAIN = "import torch\n\ndef kernel_fn(gate, up):\n    return torch.sigmoid(gate).mul_(gate).mul_(up)\n"


def test_the_kernel_itself_runs_and_not_a_copy_of_the_original():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    optimized = optimize(model, [silu_kernel(model, PLAIN.replace(".mul_(up)", ".mul_(up).add_(100)"), x)])
    with torch.no_grad():
        assert torch.allclose(optimized(x), model(x) + 100, atol=1e-4)


def test_a_shape_that_was_not_verified_runs_the_original_and_is_counted():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    kernel = silu_kernel(model, PLAIN, x)
    gate, up = (replace(spec, dims=("B", 16)) for spec in kernel.target.inputs)
    out = replace(kernel.target.outputs[0], dims=("B", 16))
    key = kernel.target.key.replace("[4,16]", '["=B",16]')
    target = replace(kernel.target, inputs=(gate, up), outputs=(out,), bindings=({"B": 4}, {"B": 6}), key=key)
    optimized = optimize(model, [Kernel(target, PLAIN)])
    with torch.no_grad():
        for rows, sites, fallbacks in ((4, 1, 0), (7, 1, 1), (6, 2, 1), (3, 2, 2), (5, 2, 2)):
            other, calls = torch.randn(rows, 8), sum(optimized.calls().values())
            assert torch.allclose(optimized(other), model(other), atol=1e-5)
            assert applied(optimized) == sites
            assert sum(optimized.sites.fallback.values()) == fallbacks
            assert sum(optimized.calls().values()) - calls == (rows in (4, 5, 6))
    assert "is outside what was verified (4..6)" in optimized.sites.reasons[0]


def test_gradients_are_those_of_the_original():
    model, x = SiluUp(), torch.randn(4, 8, requires_grad=True)
    optimized = optimize(model, [silu_kernel(model, PLAIN, x.detach())])
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    given = torch.autograd.grad(optimized(x).square().sum(), [x, *model.parameters()])
    assert applied(optimized) == 1
    for mine, theirs in zip(given, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_the_off_switch_runs_the_original_from_the_next_call(monkeypatch):
    model, x = SiluUp().eval(), torch.randn(4, 8)
    optimized = optimize(model, [silu_kernel(model, PLAIN.replace(".mul_(up)", ".mul_(up).add_(100)"), x)])
    monkeypatch.setenv("OVERNIGHT_DISABLE", "1")
    with torch.no_grad():
        assert torch.equal(optimized(x), model(x))


PACKED = """import torch

def prepack(weight, bias):
    return weight.t().contiguous() * 2, bias

def kernel_fn(x, weight, bias):
    return torch.addmm(bias, x, weight, alpha=0.5)
"""


def packed_linear(model, x) -> Kernel:
    heavy = next(kernel for kernel in identity_kernels(model, (x,)) if kernel.target.kind == "heavy")
    first, *weights = heavy.target.inputs
    inputs = (first, *(replace(spec, role=Role.WEIGHT) for spec in weights))
    return Kernel(replace(heavy.target, inputs=inputs), PACKED)


def test_packed_weights_are_made_once_and_again_after_a_write():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(4, 8)
    optimized = optimize(model, [packed_linear(model, x)])
    (packer,) = [op.packer for op in optimized.splicer.ops]
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(optimized(x), model(x), atol=1e-5)
        (packed,) = packer.kept.values()
        address = packed.tensors[0].data_ptr()
        model[0].weight.add_(1)
        assert torch.allclose(optimized(x), model(x), atol=1e-5)
        model[0].weight.data.mul_(3)
        optimized.refresh()
        assert torch.allclose(optimized(x), model(x), atol=1e-5)
        assert packed.tensors[0].data_ptr() == address
    assert applied(optimized) == 1


class ComputesItsWeight(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x, torch.tanh(x) * 2, x[0, :4] + 1)


def test_what_is_not_a_parameter_is_never_packed():
    model, x = ComputesItsWeight().eval(), torch.randn(4, 8)
    optimized = optimize(model, [packed_linear(model, x)])
    difference = check(optimized, model, ((x,), {}))
    assert difference.ok, difference.detail
    assert applied(optimized) == 0
    assert "not a parameter" in optimized.sites.reasons[0]


class Around(nn.Module):
    """A user's model with the optimised one inside, and the same structure once outside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.own = inner, SiluUp()

    def forward(self, x):
        return self.inner(x) + self.own(x)


def test_kernels_survive_the_users_own_compile_and_stay_inside_their_model():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    optimized = optimize(model, [silu_kernel(model, PLAIN.replace(".mul_(up)", ".mul_(up).add_(100)"), x)])
    around = Around(optimized).eval()
    with torch.no_grad():
        wanted = model(x) + 100 + around.own(x)
        assert torch.allclose(torch.compile(around)(x), wanted, atol=1e-4)
    assert applied(optimized) == 1


def test_a_kernel_that_returns_its_input_is_refused_at_run_time():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    optimized = optimize(model, [silu_kernel(model, "def kernel_fn(gate, up):\n    return gate\n", x)])
    with torch.no_grad(), pytest.raises(RuntimeError, match="returned one of its inputs"):
        optimized(x)


def test_a_kernel_that_returns_too_much_is_named():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    source = "def kernel_fn(gate, up):\n    return gate * up, up + 1\n"
    optimized = optimize(model, [kernel := silu_kernel(model, source, x)])
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"kernel of {kernel.target.id} returned .tuple."):
        optimized(x)


def test_a_file_without_kernel_fn_is_the_users_error():
    model, x = SiluUp().eval(), torch.randn(4, 8)
    with pytest.raises(InputError, match="defines no kernel_fn"):
        build_op(silu_kernel(model, "def kernel(gate, up):\n    return gate * up\n", x))


def test_attributes_of_the_original_are_reachable():
    model = SiluUp()
    optimized = optimize(model, [])
    assert optimized.gate is model.gate
    assert set(optimized.state_dict()) == {f"original.{name}" for name in model.state_dict()}
    with pytest.raises(AttributeError):
        _ = optimized.nonsense


def test_a_copy_of_a_view_has_the_same_strides():
    for tensor in (
        torch.randn(4, 6).t(),
        torch.randn(8, 8)[::2, 1::3],
        torch.randn(1, 5).expand(3, 5),
        torch.tensor(2.0),
    ):
        twin = like_original(tensor)
        assert twin.stride() == tensor.stride()
        assert torch.equal(twin, tensor)
        assert twin.data_ptr() != tensor.data_ptr()


def test_owned_outputs_are_copies_that_share_memory_as_before_and_leave_inputs_alone():
    x, hidden, wide = torch.randn(4), torch.randn(4, 6), torch.randn(3, 8)
    mine = owned([x, hidden, hidden.t(), 3, wide[:, ::2]], {x.untyped_storage().data_ptr()})
    assert mine[0] is x
    assert mine[3] == 3
    assert torch.equal(mine[1], hidden)
    assert mine[1].data_ptr() == mine[2].data_ptr() != hidden.data_ptr()
    assert mine[2].stride() == (1, 6)
    assert mine[4].stride() == (8, 2)
    assert torch.equal(mine[4], wide[:, ::2])


class Cache:
    def __init__(self):
        self.layers = [SimpleNamespace(keys=None, length=0)]


class Grows(nn.Module):
    """Extends a cache object, as language models do while they generate."""

    def forward(self, x, cache=None):
        cache = cache or Cache()
        layer = cache.layers[0]
        new = torch.sigmoid(x) * 2
        layer.keys = new if layer.keys is None else torch.cat([layer.keys, new])
        return torch.tanh(layer.keys) * 2, cache


def test_a_cache_object_keeps_tensors_of_its_own():
    model, x = Grows().eval(), torch.randn(3, 8)
    optimized = optimize(model, identity_kernels(model, (x,)), cudagraphs=True)
    with torch.no_grad():
        mine, theirs = optimized(x)[1], model(x)[1]
        before = mine.layers[0].keys
        assert [key for _, key in held_tensors([mine])] == ["keys"]
        for _ in range(2):
            (given, mine), (wanted, theirs) = optimized(x, cache=mine), model(x, cache=theirs)
            assert torch.allclose(given, wanted, atol=1e-6)
            assert torch.allclose(mine.layers[0].keys, theirs.layers[0].keys, atol=1e-6)
        assert torch.equal(before, torch.sigmoid(x) * 2)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4096)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))), x.sum()


@pytest.mark.gpu
@needs_gpu
def test_large_graphed_outputs_stay_valid_without_a_copy():
    model = Head().cuda().half().eval()
    inputs = [torch.randn(1024, 8, device="cuda", dtype=torch.float16) for _ in range(5)]
    optimized = optimize(model, [])
    with torch.no_grad():
        for _ in range(4):
            results = [optimized(x)[0] for x in inputs]
            for x, mine in zip(inputs, results, strict=True):
                assert torch.allclose(mine, model(x)[0], atol=1e-2)
        del results, mine
        places = set()
        for x in inputs * 2:
            mine = optimized(x)[0]
            places.add(mine.data_ptr())
    assert optimized.backend.players[0].why_not == ""
    assert len(places) == 2


@pytest.mark.gpu
@needs_gpu
def test_a_changed_flag_is_noticed_although_the_call_was_launched_before_the_guards():
    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.double = nn.Linear(8, 8), False

        def forward(self, x):
            return self.line(x) * (2 if self.double else 1)

    model, x = Flagged().cuda().eval(), torch.randn(4, 8, device="cuda")
    optimized = optimize(model, [])
    with torch.no_grad():
        for step in range(12):
            model.double = step % 6 == 5
            assert torch.allclose(optimized(x), model(x), atol=1e-5)
        model.line.weight = nn.Parameter(torch.randn(8, 8, device="cuda"))
        for _ in range(4):
            assert torch.allclose(optimized(x), model(x), atol=1e-5)
            model.line.weight.mul_(1.5)


@pytest.mark.gpu
@needs_gpu
def test_outputs_of_a_graphed_call_stay_valid_after_the_next_call():
    model = ReturnsViews().cuda().half().eval()
    x, y = (torch.randn(4, 8, device="cuda", dtype=torch.float16) for _ in range(2))
    optimized = optimize(model, identity_kernels(model, (x,)))
    with torch.no_grad():
        for _ in range(4):
            first = optimized(x)
            wanted = model(x)
            optimized(y)
            for mine, theirs in zip(first, wanted, strict=True):
                assert torch.allclose(mine, theirs, atol=1e-2)
            assert first[0].data_ptr() == x.data_ptr()
            assert first[3].data_ptr() == first[2].data_ptr()
    assert applied(optimized) > 0


@pytest.mark.gpu
@needs_gpu
def test_a_graphed_replay_launches_the_kernel_as_often_as_there_are_sites():
    model, x = SiluUp().cuda().half().eval(), torch.randn(64, 8, device="cuda", dtype=torch.float16)
    source = (
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def spliced_silu_mul(gate, up, out, count, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    g = tl.load(gate + at, mask=at < count).to(tl.float32)\n"
        "    u = tl.load(up + at, mask=at < count).to(tl.float32)\n"
        "    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < count)\n"
        "def kernel_fn(gate, up):\n"
        "    out = torch.empty_like(gate)\n"
        "    spliced_silu_mul[(triton.cdiv(gate.numel(), 256),)](gate, up, out, gate.numel(), BLOCK=256)\n"
        "    return out\n"
    )
    optimized = optimize(model, [silu_kernel(model, source, x)])
    with torch.no_grad():
        for _ in range(4):
            assert torch.allclose(optimized(x), model(x), atol=1e-2)
        before = sum(optimized.calls().values())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimized(x)
            torch.cuda.synchronize()
    launches = sum(event.count for event in profile.key_averages() if "spliced_silu_mul" in event.key)
    assert launches == applied(optimized) == 1
    assert sum(optimized.calls().values()) == before  # a replay does not pass through Python


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("make", [RunningMean, WritesThroughViews, WritesToItsInput, BreaksTheGraph])
def test_graphed_models_with_state_agree_with_eager_on_consecutive_calls(make):
    model, x = make().cuda().eval(), torch.randn(4, 8, device="cuda")
    optimized = optimize(model, identity_kernels(model, (x,)))
    for _ in range(3):
        difference = check(optimized, model, ((x,), {}))
        assert difference.ok, difference.detail

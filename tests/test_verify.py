"""Whole-model verification: honest about wrong outputs, about modes that do not run, and about what was applied."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from identity import identity_kernels
from torch import nn

from harness.capture import capture
from harness.errors import InputError
from harness.kernel_op import Kernel, read_kernel
from harness.latency import interval, measure, speedup
from harness.loading import load_model
from harness.modes import MODES
from harness.outputs import compare, leaves, redrawn
from harness.records import KeptKernel, ModelSpec, VerifyReport, VerifyRequest
from harness.soundness import truth_of
from harness.targets import draft_targets, finish
from harness.verify import LOOP_MODES, verify, verify_model
from harness.wire import to_json


@pytest.fixture(autouse=True)
def _one_thread():
    """On a busy machine two threads that wait for each other take longer than any kernel here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Example:
    """A model of these tests with its inputs, as a loaded one."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    name: str = "example"
    input_sets: tuple[Any, ...] = ()


class Norm(nn.Module):
    """Rescales in float32 whatever its input is, like every RMSNorm found in the wild."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x):
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), Norm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 50)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return {"logits": self.down(nn.functional.silu(self.gate(x)) * self.up(x)), "count": ids.numel()}


def small() -> Example:
    torch.manual_seed(0)
    return Example(Small().eval(), (torch.randint(0, 50, (2, 9)),))


def light_kernels(example: Example) -> list[Kernel]:
    kernels = identity_kernels(example.model, example.args, example.kwargs)
    return [kernel for kernel in kernels if kernel.target.kind == "light"]


def off_by(kernel: Kernel, factor: float) -> Kernel:
    """The same kernel with a wrong result."""
    source = kernel.source.replace("def kernel_fn(", "def right(")
    return Kernel(kernel.target, source + f"\n\ndef kernel_fn(*x):\n    return right(*x) * {factor}\n")


def heard() -> tuple[list[str], Any]:
    names: list[str] = []
    return names, lambda name, _body: names.append(name)


def test_a_right_model_is_called_right_and_every_mode_has_a_number_or_a_reason():
    example, (names, emit) = small(), heard()
    kernels = light_kernels(example)
    report = verify_model(example, kernels, emit, budget_s=0.2)
    assert report.outputs_ok, report.detail
    assert report.max_error < 1e-4
    assert report.sites.applied == len(kernels) > 0
    assert report.sites.fallback == 0
    assert [measured.mode for measured in report.modes] == list(MODES)
    for measured in report.modes:
        assert (measured.median_ms is None) == (measured.reason is not None)
        if measured.median_ms is not None:
            assert measured.ci_low <= measured.median_ms <= measured.ci_high
    times = {measured.mode: measured.median_ms for measured in report.modes}
    assert report.model_speedup == pytest.approx(min(times["eager"], times["compile"]) / times["overnight"])
    assert report.model_speedup_vs_eager == pytest.approx(times["eager"] / times["overnight"])
    assert "outputs" in names
    assert to_json(report)


def test_a_wrong_kernel_is_noticed_and_named_by_bisecting():
    example, (_, emit) = small(), heard()
    kernels = light_kernels(example)
    assert len(kernels) >= 2
    kernels[1] = off_by(kernels[1], 1.001)
    report = verify_model(example, kernels, emit, modes=("overnight",), bisect=True, budget_s=0.05)
    assert not report.outputs_ok
    assert "float64" in report.detail
    assert report.suspects == (kernels[1].target.id,)


def test_a_slow_kernel_is_named_by_bisecting():
    example, (_, emit) = small(), heard()
    kernels = light_kernels(example)
    slow = "import time\n" + kernels[0].source.replace("def kernel_fn(", "def right(")
    slow += "\n\ndef kernel_fn(*x):\n    time.sleep(0.05)\n    return right(*x)\n"
    kernels[0] = Kernel(kernels[0].target, slow)
    report = verify_model(example, kernels, emit, modes=("overnight", "eager"), bisect=True, budget_s=0.3)
    assert report.outputs_ok
    assert not report.faster
    assert report.model_speedup < 1
    assert kernels[0].target.id in report.suspects


def test_a_new_kernel_that_slows_the_model_shows_against_the_model_before_it():
    example, (_, emit) = small(), heard()
    kernels = light_kernels(example)
    slow = "import time\n" + kernels[0].source.replace("def kernel_fn(", "def right(")
    slow += "\n\ndef kernel_fn(*x):\n    time.sleep(0.02)\n    return right(*x)\n"
    report = verify_model(
        example, [Kernel(kernels[0].target, slow)], emit, modes=("overnight",), before=kernels[:1], budget_s=0.3
    )
    assert report.outputs_ok
    assert report.newest is not None
    assert report.newest.high < 1.0
    assert [mode.mode for mode in report.modes if mode.median_ms is not None] == ["overnight"]


def test_a_kernel_that_raises_spoils_only_its_own_mode():
    example, (_, emit) = small(), heard()
    kernel = light_kernels(example)[0]
    report = verify_model(
        example,
        [Kernel(kernel.target, "def kernel_fn(*x):\n    raise RuntimeError('no such luck')\n")],
        emit,
        modes=LOOP_MODES,
        budget_s=0.05,
    )
    by_mode = {measured.mode: measured for measured in report.modes}
    assert not report.outputs_ok
    assert not report.faster
    assert math.isinf(report.max_error)
    assert "no such luck" in by_mode["overnight"].reason
    assert by_mode["eager"].median_ms is not None
    assert by_mode["compile"].median_ms is not None
    assert to_json(report)


def test_a_kernel_for_another_model_is_reported_as_not_applied():
    example, (_, emit) = small(), heard()
    stranger = identity_kernels(nn.Sequential(nn.Hardswish(), nn.Softsign()).eval(), (torch.randn(3, 5),))[0]
    report = verify_model(example, [stranger], emit, modes=("overnight",), budget_s=0.05)
    assert report.outputs_ok
    assert report.applied == {stranger.target.id: 0}
    assert report.sites.applied == 0
    assert report.sites.fallback == len(stranger.target.call_sites)
    assert "not applied" in report.detail


def test_an_unknown_mode_is_the_users_error():
    with pytest.raises(InputError, match="unknown mode 'turbo'"):
        verify(VerifyRequest(ModelSpec("nowhere.py:Model"), (), modes=("turbo",)), heard()[1])


class Hides(nn.Module):
    """Writes its buffer, and differs from call to call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.sigmoid(x * self.calls)


def test_verifying_leaves_the_buffers_as_they_were():
    example, (_, emit) = Example(Hides().eval(), (torch.randn(4, 8),)), heard()
    kernels = light_kernels(example)
    example.model.calls.zero_()
    report = verify_model(example, kernels, emit, modes=("overnight", "eager"), budget_s=0.05)
    assert report.outputs_ok, report.detail
    assert float(example.model.calls) == 0


class Noisy(nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(torch.sigmoid(x) * 2, 0.5, training=True) + torch.rand_like(x)


def test_a_random_model_is_compared_with_equal_seeds():
    example, (_, emit) = Example(Noisy().eval(), (torch.randn(16, 8),)), heard()
    right = verify_model(example, light_kernels(example), emit, modes=("overnight",), budget_s=0.05)
    assert right.outputs_ok, right.detail
    assert right.sites.applied > 0
    wrong = [off_by(kernel, 1.01) for kernel in light_kernels(example)]
    assert not verify_model(example, wrong, emit, modes=("overnight",), budget_s=0.05).outputs_ok


def test_the_request_names_a_model_and_target_files(tmp_path):
    path = Path(__file__).parent.parent / "models" / "llama.py"
    sizes = {"layers": "1", "dim": "32", "heads": "2", "vocab": "50", "length": "12"}
    spec = ModelSpec(f"{path}:LLaMA", model_args=sizes, device="cpu")
    kept = []
    for draft in draft_targets(capture(load_model(spec))):
        target = finish(draft, {})
        file = tmp_path / f"{target.id}.json"
        file.write_text(to_json(target))
        kept.append(KeptKernel(str(file), f"{target.reference}\n\nkernel_fn = reference\n"))
    (tmp_path / "broken.json").write_text("{}")
    report = verify(VerifyRequest(spec, tuple(kept), modes=("overnight", "eager")), heard()[1])
    assert report.outputs_ok, report.detail
    assert report.sites.applied == sum(len(read_kernel(one).target.call_sites) for one in kept) > 10
    assert report.sites.fallback == 0
    with pytest.raises(InputError, match="not a target"):
        verify(VerifyRequest(spec, (KeptKernel(str(tmp_path / "broken.json"), ""),)), heard()[1])
    with pytest.raises(InputError, match="cannot be read"):
        verify(VerifyRequest(spec, (KeptKernel(str(tmp_path / "missing.json"), ""),)), heard()[1])


def test_float64_truth_sees_through_casts_to_float32():
    torch.manual_seed(0)
    norm, x = Norm(64), torch.randn(8, 64)
    truth = dict(truth_of(norm, ((x,), {})))["first output"]
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    assert truth.dtype is torch.float64
    assert float((truth - exact).detach().abs().max()) < 1e-14


def found(*values: Any) -> list[tuple[str, Any]]:
    return [(str(index), value) for index, value in enumerate(values)]


def test_half_precision_noise_passes_and_a_worse_precision_fails():
    torch.manual_seed(0)
    truth = torch.randn(64, 64, dtype=torch.float64)
    original, ours = truth.to(torch.bfloat16), (truth * (1 + 2**-10)).to(torch.bfloat16)
    coarse = (truth * (1 + 2**-4)).to(torch.bfloat16)
    assert compare(found(ours), found(original), found(truth)).ok
    assert not compare(found(coarse), found(original), found(truth)).ok


def test_a_truth_that_strays_from_the_model_excuses_nothing():
    original = torch.randn(64, 64)
    nonsense = original.double() + torch.randn(64, 64, dtype=torch.float64)
    assert compare(found(original.clone()), found(original), found(nonsense)).ok
    assert not compare(found(original + 0.5), found(original), found(nonsense)).ok


@pytest.mark.parametrize(
    ("ours", "original"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")])),
        (3, 4),
        (3, 3.0),
        (None, torch.zeros(1)),
    ],
)
def test_leaves_that_differ_in_kind_or_value_fail(ours, original):
    assert not compare(found(ours), found(original), None).ok
    assert compare(found(original), found(original), None).ok


@dataclass
class Nested:
    first: torch.Tensor
    rest: dict[str, Any]


def test_leaves_are_found_in_any_nesting():
    value = (Nested(torch.ones(1), {"a": [torch.ones(2), None]}), 3)
    paths = [path for path, _ in leaves(value, "out")]
    assert paths == ["out[0].first", "out[0].rest['a'][0]", "out[0].rest['a'][1]", "out[1]"]


def test_redrawn_inputs_differ_and_stay_in_range():
    ids, mask, x = torch.randint(5, 90, (4, 16)), torch.tensor([[1, 1, 0]]), torch.randn(6, 8).t()
    (new_ids, new_mask, new_x), kwargs = redrawn(((ids, mask, x), {"flag": True}), 3)
    assert not torch.equal(new_ids, ids)
    assert int(ids.min()) <= int(new_ids.min())
    assert int(new_ids.max()) <= int(ids.max())
    assert torch.equal(new_mask, mask)
    assert new_x.stride() == x.stride()
    assert not torch.equal(new_x, x)
    assert kwargs == {"flag": True}


def test_a_bootstrap_interval_covers_the_median_and_a_ratio_cancels_common_drift():
    generator = torch.Generator().manual_seed(0)
    drift = (1 + torch.rand(60, generator=generator)).tolist()
    ours, other = drift, [2 * value for value in drift]
    found_interval = interval(ours)
    assert found_interval.low <= found_interval.median <= found_interval.high
    ratio = speedup(ours, other)
    assert ratio.low == pytest.approx(2)
    assert ratio.high == pytest.approx(2)
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_modes_are_timed_in_turns():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = measure(calls, on_gpu=False, budget_s=0.0)
    assert {len(values) for values in samples.values()} == {8}
    for start in range(0, len(order), 3):
        assert set(order[start : start + 3]) == set("abc")
    assert {order[start] for start in range(0, len(order), 3)} == set("abc")


def test_the_report_of_a_gpu_free_machine_says_why_modes_are_missing():
    example, (_, emit) = small(), heard()
    report: VerifyReport = verify_model(example, [], emit, modes=("eager", "eager_graph"), budget_s=0.05)
    reasons = {measured.mode: measured.reason for measured in report.modes}
    assert reasons["eager_graph"] == "CUDA graphs need a CUDA device"
    assert reasons["compile"] == "not requested"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_mode_has_a_number_on_a_gpu():
    example, (_, emit) = small(), heard()
    on_gpu = Example(example.model.cuda().half(), tuple(ids.cuda() for ids in example.args), device="cuda")
    report = verify_model(on_gpu, light_kernels(on_gpu), emit, budget_s=1.0)
    assert report.outputs_ok, report.detail
    assert report.sites.applied > 0
    for measured in report.modes:
        assert measured.median_ms is not None, f"{measured.mode}: {measured.reason}"
        assert measured.peak_memory_mb > 0

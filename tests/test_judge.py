"""The judge from a kernel file to a verdict, with real workers on the CPU."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from harness import wire
from harness.errors import InputError, OursError
from harness.examination import run_stages
from harness.judge import Judge, silent
from harness.oracle import Oracle
from harness.problem import named_problem, strides_like, target_problem
from harness.records import Blame, CallSite, JudgeRequest, Role, StageName, StageStatus, Status, Target, TensorSpec
from harness.specs.softmax import SPEC as SOFTMAX
from harness.stages import Exam, Examinee, Progress, arena_bytes
from harness.statics import read_kernel

SOFTMAX_FILE = "import torch\n\n\ndef kernel_fn(x):\n    return torch.softmax(x, dim=-1)\n"
SCALED = "import torch\n\n\ndef reference(x, weight, *, scale):\n    return x * weight * scale, (x * scale).sum(-1)\n"
SCALED_KERNEL = """import torch


def kernel_fn(x, weight, scale):
    return x * weight * scale, (x * scale).sum(-1)
"""


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.close()


def decided(judge, target, source, **options):
    options.setdefault("bench", False)
    return judge.judge(JudgeRequest(str(target), source, **options), silent)


def spec(name, role, shape, dims, stride=None):
    plain = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(name, role, "float32", shape, stride or plain, dims)


def scaled_target(**changes) -> Target:
    target = Target(
        id="scaled",
        kind="other",
        title="Scaled x2",
        key="k",
        inputs=(
            spec("x", Role.ACTIVATION, (12, 40), ("s0", 40)),
            spec("weight", Role.WEIGHT, (40,), (40,)),
        ),
        constants={"scale": 0.5},
        outputs=(spec("y", Role.ACTIVATION, (12, 40), ("s0", 40)), spec("z", Role.ACTIVATION, (12,), ("s0",))),
        graph=(),
        results=(),
        reference=SCALED,
        bindings=({"s0": 12}, {"s0": 1}, {"s0": 37}),
        call_sites=(CallSite(0, "model.a", "a.py:1"),),
        flops=100,
        bytes=100,
    )
    return dataclasses.replace(target, **changes)


def written(folder: Path, target: Target, samples=None) -> Path:
    path = folder / f"{target.id}.json"
    path.write_text(wire.to_json(target))
    if samples is not None:
        torch.save(samples, folder / f"{target.id}.samples.pt")
    return path


def test_a_verdict_names_all_six_stages_and_the_hash_of_what_was_judged(judge):
    verdict = decided(judge, "softmax", SOFTMAX_FILE)
    assert verdict.accepted
    assert set(verdict.stages) == set(StageName)
    assert verdict.stages[StageName.BENCHMARK].status is StageStatus.NOT_RUN
    assert all(verdict.stages[name].status is StageStatus.PASS for name in list(StageName)[:5])
    assert verdict.sandbox
    assert len(verdict.kernel_sha256) == 64
    assert wire.from_json(type(verdict), wire.to_json(verdict)) == verdict


def test_a_hopeless_candidate_is_refused_quickly_once_the_judge_is_warm(judge):
    decided(judge, "softmax", SOFTMAX_FILE)
    begin = time.perf_counter()
    verdict = decided(judge, "softmax", "import torch\n\n\ndef kernel_fn(x):\n    return torch.zeros_like(x)\n")
    assert verdict.status is Status.INCORRECT
    assert time.perf_counter() - begin < 30  # a hang guard; the budget itself is measured by benchmarks


def test_an_unknown_target_or_symbol_is_the_users_input(judge):
    with pytest.raises(InputError, match="softmaxx"):
        decided(judge, "softmaxx", SOFTMAX_FILE)
    with pytest.raises(InputError, match="--shape"):
        decided(judge, "softmax", SOFTMAX_FILE, shape={"Q": 3})
    with pytest.raises(InputError, match="int8"):
        decided(judge, "softmax", SOFTMAX_FILE, dtype="int8")


def test_shape_and_dtype_narrow_a_check():
    problem = named_problem(SOFTMAX, "cpu", dtype="bf16", shape={"M": 6, "N": 10})
    cases = [case for stage in problem.cases.values() for case in stage]
    assert {case.dtype for case in cases} == {"bfloat16"}
    assert {case.inputs[0].shape for case in cases} == {(6, 10)}


def test_half_precision_on_the_cpu_stays_small():
    problem = named_problem(SOFTMAX, "cpu")
    halves = [case for stage in problem.cases.values() for case in stage if case.dtype != "float32"]
    assert halves
    assert max(case.inputs[0].extent for case in halves if "view" not in case.name) <= 2**16


def test_a_session_target_is_judged_at_all_its_bindings_with_constants_by_keyword(judge, tmp_path):
    path = written(tmp_path, scaled_target(), samples=[(torch.randn(12, 40), torch.randn(40))])
    verdict = decided(judge, path, SCALED_KERNEL)
    assert verdict.accepted, verdict.detail
    assert verdict.target == "scaled"
    only_twelve = SCALED_KERNEL.replace("    return", "    assert x.shape[0] == 12\n    return")
    assert decided(judge, path, only_twelve).stage is StageName.SHAPES


def test_the_last_of_several_outputs_counts(judge, tmp_path):
    path = written(tmp_path, scaled_target())
    verdict = decided(judge, path, SCALED_KERNEL.replace("(x * scale).sum(-1)", "(x * scale)[:, 0]"))
    assert verdict.status is Status.INCORRECT
    assert "output 1" in verdict.detail


def test_a_kernel_that_leaves_out_a_constant_is_refused_unread(judge, tmp_path):
    path = written(tmp_path, scaled_target())
    verdict = decided(judge, path, "def kernel_fn(x, weight):\n    return x\n")
    assert not verdict.accepted
    assert "scale" in verdict.detail


@pytest.mark.parametrize("degenerate", ["(x * 0).sum(-1)", "torch.softmax(x, -1).sum(-1)", "torch.ones_like(x[:, 0])"])
def test_a_degenerate_reference_is_unjudgeable_and_that_is_not_the_candidates_fault(judge, tmp_path, degenerate):
    source = f"import torch\n\n\ndef reference(x):\n    return {degenerate}\n"
    whole = scaled_target()
    target = dataclasses.replace(
        whole, id="degenerate", inputs=whole.inputs[:1], outputs=whole.outputs[1:], constants={}, reference=source
    )
    kernel = source.replace("reference", "kernel_fn")
    verdict = decided(judge, written(tmp_path, target), kernel)
    assert (verdict.status, verdict.guard, verdict.blame) == (Status.ENVIRONMENT, "unjudgeable", Blame.OURS)


def test_transposed_captured_strides_are_kept_at_another_size():
    transposed = spec("x", Role.ACTIVATION, (4, 6), ("s0", 6), stride=(1, 4))
    assert strides_like(transposed, (4, 6)) == (1, 4)
    assert strides_like(transposed, (9, 6)) == (1, 9)


@pytest.mark.slow
def test_cpp_rmsnorm_is_kept_or_discarded_by_its_interval_alone(judge):
    source = (Path(__file__).parents[1] / "kernels" / "cpp" / "rmsnorm.py").read_text()
    verdict = decided(judge, "rmsnorm", source, bench=True)
    if verdict.guard == "unreliable":
        pytest.skip("this machine is too busy to time anything: " + verdict.detail)
    assert verdict.accepted, verdict.detail
    timing = verdict.timing
    assert timing.ci_low <= timing.speedup_vs_best <= timing.ci_high
    wins = timing.ci_low > 1 + max(0.005, 2 * timing.noise)
    assert (verdict.status is Status.KEEP) <= wins


@pytest.mark.slow
def test_a_correct_but_slower_kernel_is_accepted_and_discarded(judge):
    slow = (Path(__file__).parent / "redteam" / "honest" / "slow_softmax.py").read_text()
    verdict = decided(judge, "softmax", slow, bench=True)
    if verdict.guard == "unreliable":
        pytest.skip("this machine is too busy to time anything: " + verdict.detail)
    assert verdict.status is Status.DISCARD
    assert verdict.timing.speedup_vs_best < 1


HARD_CODED = """import torch


def kernel_fn(x, weight, *, scale):
    y, z = x * weight * scale, (x * scale).sum(-1)
    return (y, z) if x.shape[0] in (12, 1, 37) else (torch.zeros_like(y), z)
"""


def test_a_kernel_hard_coded_to_the_listed_sizes_of_a_session_target_is_refused_between_them(judge, tmp_path):
    """The splicer uses a kernel at every size from the smallest to the largest of `Target.bindings`."""
    path = written(tmp_path, scaled_target())
    verdict = decided(judge, path, HARD_CODED)
    assert not verdict.accepted
    assert verdict.stage == "shapes", verdict.detail
    assert "secret shape" in verdict.detail


def test_secret_sizes_of_a_session_target_lie_between_its_listed_ones_and_follow_products_of_symbols():
    inputs = (spec("x", Role.ACTIVATION, (96, 40), ("8*B", 40)),)
    target = scaled_target(inputs=inputs, outputs=inputs, bindings=({"B": 12}, {"B": 1}, {"B": 37}))
    draw = target_problem(target, "cpu", None, 0).secret_cases
    cases = draw(StageName.SHAPES)
    assert len({case.bindings["B"] for case in cases}) == 2
    for case in cases:
        assert case.bindings["B"] not in {1, 12, 37}
        assert case.inputs[0].shape == (8 * case.bindings["B"], 40)


def run_softmax_with_reference(judge, condition):
    """All stages of a right softmax whose original raises where `condition` holds; the detail of the edge stage."""
    reference = SOFTMAX.reference.replace(
        "(x):\n", f"(x):\n    if {condition}:\n        raise RuntimeError('no kernel found to launch')\n"
    )
    oracle = Oracle(named_problem(dataclasses.replace(SOFTMAX, reference=reference), "cpu", dtype="float32"))
    workshop, nbytes = judge.workshop("cpu"), arena_bytes(oracle)
    kernel = read_kernel(SOFTMAX_FILE, arguments=1, keywords=())
    examinee = Examinee(workshop, oracle, SOFTMAX_FILE, nbytes)
    progress = Progress(silent)
    try:
        run_stages(Exam(workshop, oracle, SOFTMAX_FILE, kernel, nbytes), examinee, progress)
    finally:
        examinee.close()
    return progress.results[StageName.EDGE]


def test_a_view_that_the_original_refuses_falls_away_with_a_note(judge):
    result = run_softmax_with_reference(judge, "not x.is_contiguous()")
    assert result.status is StageStatus.PASS
    assert "not applicable" in result.detail
    assert "no kernel found to launch" in result.detail


def test_a_stage_of_which_the_original_refuses_every_case_is_not_passed(judge):
    sizes = {at["M"] for at in SOFTMAX.edge}
    with pytest.raises(OursError, match="refuses every case of the edge stage"):
        run_softmax_with_reference(judge, f"x.shape[0] in {sizes} or not x.is_contiguous()")

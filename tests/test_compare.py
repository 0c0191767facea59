"""The yardstick, the truth and the statistics, as pure functions on tensors and numbers."""

import math

import pytest
import torch

from harness.compare import Expected, compare, compare_all
from harness.intervals import bar, clustered_interval, geometric_mean, process_noise, quad_log_ratio
from harness.truth import compile_reference, in_float64, original, with_rounding_noise

MATMUL = "import torch\n\n\ndef reference(a, b):\n    return torch.matmul(a, b)\n"
RMSNORM = """import torch


def reference(x, weight):
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
"""


def expected_of(source: str, *inputs: torch.Tensor) -> Expected:
    reference = compile_reference(source)
    generator = torch.Generator().manual_seed(11)
    noisy = [with_rounding_noise(reference, inputs, {}, unit_roundoff=2.0**-24, generator=generator) for _ in range(3)]
    truth, own = in_float64(reference, inputs, {}), original(reference, inputs, {})
    return Expected(truth[0], own[0], tuple(run[0] for run in noisy))


def serial_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        result.addr_(a[:, k].contiguous(), b[k].contiguous())
    return result


def tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("depth", [43, 512, 4096])
@pytest.mark.parametrize("positive", [False, True])
def test_an_honest_k_serial_float32_product_passes_at_every_depth(depth, positive):
    a, b = torch.randn(24, depth), torch.randn(depth, 40)
    a, b = (a.abs() + 0.5, b.abs() + 0.5) if positive else (a, b)
    assert compare(serial_product(a, b), expected_of(MATMUL, a, b)) is None


@pytest.mark.parametrize("depth", [43, 512, 4096])
def test_tf32_inside_a_float32_product_is_refused_at_every_depth(depth):
    a, b = torch.randn(64, depth), torch.randn(depth, 256)
    mismatch = compare(tf32(a) @ tf32(b), expected_of(MATMUL, a, b))
    assert mismatch is not None
    assert mismatch.ratio > 1.5


GROUP_NORM = """import torch


def reference(x, weight, bias):
    return torch.nn.functional.group_norm(x, 4, weight, bias, 1e-5)
"""


def nearly_constant_groups() -> tuple[torch.Tensor, ...]:
    return 0.09 + 0.0016 * torch.randn(2, 16, 48, 48), 1 + 0.1 * torch.randn(16), 0.1 * torch.randn(16)


def two_pass_group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    groups = x.view(2, 4, -1)
    mean = groups.double().mean(-1, keepdim=True)
    spread = (groups - mean).square().mean(-1, keepdim=True)
    normed = ((groups - mean) * torch.rsqrt(spread + 1e-5)).float().view_as(x)
    return normed * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


@pytest.mark.parametrize("_draw", range(4))
def test_group_norm_by_exact_statistics_passes_where_groups_are_nearly_constant(_draw):
    inputs = nearly_constant_groups()
    assert compare(two_pass_group_norm(*inputs), expected_of(GROUP_NORM, *inputs)) is None


def test_group_norm_in_half_precision_is_refused_where_groups_are_nearly_constant():
    x, weight, bias = nearly_constant_groups()
    assert compare(two_pass_group_norm(x.half().float(), weight, bias), expected_of(GROUP_NORM, x, weight, bias))


def test_exact_sums_are_compared_as_the_output_dtype_stores_them():
    a, b = torch.full((1, 257), 1.0, dtype=torch.bfloat16), torch.ones(257, 1, dtype=torch.bfloat16)
    expected = expected_of(MATMUL, a, b)
    assert compare(torch.full((1, 1), 256.0, dtype=torch.bfloat16), expected, exact=True) is None
    assert compare(torch.full((1, 1), 260.0, dtype=torch.bfloat16), expected, exact=True) is not None


def test_a_captured_float32_cast_does_not_spoil_the_float64_truth():
    x, weight = torch.randn(8, 256, dtype=torch.bfloat16), torch.randn(256, dtype=torch.bfloat16)
    (truth,) = in_float64(compile_reference(RMSNORM), (x, weight), {})
    wide = x.double()
    exact = weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert truth.dtype is torch.float64
    torch.testing.assert_close(truth, exact, rtol=1e-12, atol=1e-12)


def test_dtype_keywords_half_calls_and_autocast_are_rewritten_too():
    source = """import torch


def reference(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.softmax(x.half(), dim=-1, dtype=torch.float32).float()
        return y @ torch.ones(x.shape[-1], 3, dtype=torch.float32) + torch.full((3,), 0.1)
"""
    x = torch.randn(4, 64)
    (truth,) = in_float64(compile_reference(source), (x,), {})
    torch.testing.assert_close(truth, torch.full((4, 3), 1.1, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def plain_expectation(truth: torch.Tensor) -> Expected:
    return Expected(truth.double(), truth.clone(), (truth.double(),))


def test_a_single_wrong_element_of_a_large_output_is_refused():
    right = torch.rand(300, 500)
    wrong = right.clone()
    wrong[123, 45] *= 1.001
    assert compare(right, plain_expectation(right)) is None
    assert compare(wrong, plain_expectation(right)) is not None


def test_errors_too_small_for_the_largest_but_everywhere_are_refused():
    right = torch.rand(64, 512).bfloat16()
    tilted = (right.float() * 1.006).bfloat16()
    assert compare(tilted, plain_expectation(right)) is not None


def test_zeros_are_refused_where_the_true_values_are_tiny():
    right = torch.rand(16, 4096) * 1e-12
    assert compare(torch.zeros_like(right), plain_expectation(right)) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_element_is_no_wildcard(value):
    right = torch.rand(8, 64)
    wrong = right.clone()
    wrong[3, 7] = value
    assert compare(wrong, plain_expectation(right)) is not None
    assert compare(right, plain_expectation(wrong)) is not None
    assert compare(wrong, plain_expectation(wrong)) is None


def test_a_row_with_nan_does_not_excuse_the_other_rows():
    right = torch.rand(8, 64)
    right[2] = float("nan")
    wrong = right.clone()
    wrong[5, 5] += 0.01
    assert compare(wrong, plain_expectation(right)) is not None


def test_integers_must_be_those_of_the_original_except_at_ties():
    own, noisy = torch.tensor([3, 1, 2]), torch.tensor([3, 4, 2])
    leaf = Expected(own, own, (noisy,))
    assert compare(torch.tensor([3, 1, 2]), leaf) is None
    assert compare(torch.tensor([3, 4, 2]), leaf) is None
    assert compare(torch.tensor([3, 1, 0]), leaf) is not None


def test_every_leaf_counts_and_a_missing_one_is_refused():
    right = torch.rand(4, 4)
    leaves = (plain_expectation(right), plain_expectation(right + 1))
    assert compare_all((right, right + 1), leaves) is None
    assert compare_all((right, right), leaves) is not None
    assert compare_all((right,), leaves) is not None
    assert compare_all((), ()) is not None


def test_another_dtype_or_shape_is_refused():
    right = torch.rand(4, 4)
    assert compare(right.double(), plain_expectation(right)) is not None
    assert compare(right[:3], plain_expectation(right)) is not None


def test_exactness_is_demanded_where_integers_make_it_possible():
    right = torch.arange(12.0).view(3, 4)
    wrong = right.clone()
    wrong[1, 1] = torch.nextafter(wrong[1, 1], torch.tensor(99.0))
    assert compare(right, plain_expectation(right), exact=True) is None
    assert compare(wrong, plain_expectation(right), exact=True) is not None


def test_a_linear_drift_cancels_in_a_quad():
    assert quad_log_ratio(1.0, 2.0, 4.0, 8.0) == pytest.approx(0.0)


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(time):
    with pytest.raises(ValueError, match="positive and finite"):
        quad_log_ratio(1.0, time, 1.0, 1.0)


def test_processes_that_disagree_widen_the_interval():
    agreeing = clustered_interval([[0.1, 0.11, 0.09]] * 3)
    disagreeing = clustered_interval([[0.4, 0.41, 0.39], [0.1, 0.11, 0.09], [-0.2, -0.21, -0.19]])
    assert agreeing.ratio == pytest.approx(disagreeing.ratio, rel=1e-6)
    assert disagreeing.low < 0.9 < 1.08 < agreeing.low
    assert agreeing.high < 1.13


def test_more_trials_raise_the_bar():
    quads = [[0.1 + 0.01 * math.sin(7 * p + 3 * q) for q in range(12)] for p in range(3)]
    assert clustered_interval(quads, trials=200).low <= clustered_interval(quads, trials=0).low


def test_identical_kernels_are_never_kept_under_the_measured_noise():
    noise = process_noise([0.2, -0.1])
    assert bar(0.005, noise) > 1.3
    assert bar(0.005, 0.0) == pytest.approx(1.005)


def test_one_shape_near_zero_time_counts_like_any_other():
    quiet = clustered_interval([[0.0, 0.0]] * 3)
    jump = clustered_interval([[1.0, 1.0]] * 3)
    assert geometric_mean([quiet, quiet, quiet, jump]).ratio == pytest.approx(math.exp(0.25))

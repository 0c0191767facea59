import torch
from spec_checks import assert_calibrated, assert_true_in_float64


def plain(A, B):  # noqa: N803
    return torch.einsum("mk,kn->mn", A, B)


def test_the_float64_truth_of_matmul_is_the_textbook_formula():
    assert_true_in_float64("matmul", plain)


def test_wrong_answers_to_matmul_can_be_told_from_right_ones():
    assert_calibrated("matmul")

import torch
from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x):
    return torch.einsum("mn->m", x)


def test_the_float64_truth_of_reduce_is_the_textbook_formula():
    assert_true_in_float64("reduce", plain)


def test_wrong_answers_to_reduce_can_be_told_from_right_ones():
    assert_calibrated("reduce")

import torch
from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x, cos, sin):
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def test_the_float64_truth_of_rotary_embedding_is_the_textbook_formula():
    assert_true_in_float64("rotary_embedding", plain)


def test_wrong_answers_to_rotary_embedding_can_be_told_from_right_ones():
    assert_calibrated("rotary_embedding")

import torch
from spec_checks import assert_calibrated, assert_true_in_float64


def plain(Q, K, V):  # noqa: N803
    scores = torch.einsum("bhqd,bhkd->bhqk", Q, K) * Q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ V


def test_the_float64_truth_of_flash_attention_is_the_textbook_formula():
    assert_true_in_float64("flash_attention", plain)


def test_wrong_answers_to_flash_attention_can_be_told_from_right_ones():
    assert_calibrated("flash_attention")

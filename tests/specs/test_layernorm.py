from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def test_the_float64_truth_of_layernorm_is_the_textbook_formula():
    assert_true_in_float64("layernorm", plain)


def test_wrong_answers_to_layernorm_can_be_told_from_right_ones():
    assert_calibrated("layernorm")

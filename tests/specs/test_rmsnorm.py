from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_the_float64_truth_of_rmsnorm_is_the_textbook_formula():
    assert_true_in_float64("rmsnorm", plain)


def test_wrong_answers_to_rmsnorm_can_be_told_from_right_ones():
    assert_calibrated("rmsnorm")

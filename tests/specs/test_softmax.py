from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def test_the_float64_truth_of_softmax_is_the_textbook_formula():
    assert_true_in_float64("softmax", plain)


def test_wrong_answers_to_softmax_can_be_told_from_right_ones():
    assert_calibrated("softmax")

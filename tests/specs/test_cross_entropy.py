from spec_checks import assert_calibrated, assert_true_in_float64


def plain(logits, targets):
    picked = logits.gather(1, targets[:, None])[:, 0]
    return (logits.logsumexp(-1) - picked).mean()


def test_the_float64_truth_of_cross_entropy_is_the_textbook_formula():
    assert_true_in_float64("cross_entropy", plain)


def test_wrong_answers_to_cross_entropy_can_be_told_from_right_ones():
    assert_calibrated("cross_entropy")

from spec_checks import assert_calibrated, assert_true_in_float64


def plain(x, w_gate, w_up, w_down):
    gate = x @ w_gate.T
    return (gate / (1 + (-gate).exp()) * (x @ w_up.T)) @ w_down.T


def test_the_float64_truth_of_fused_mlp_is_the_textbook_formula():
    assert_true_in_float64("fused_mlp", plain)


def test_wrong_answers_to_fused_mlp_can_be_told_from_right_ones():
    assert_calibrated("fused_mlp")

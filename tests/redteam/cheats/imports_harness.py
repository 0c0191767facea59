# expect: forbidden_import
# target: softmax
# Imports the judge.
from harness.truth import in_float64


def kernel_fn(x):
    return in_float64

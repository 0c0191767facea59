# expect: smoke
# target: softmax
# KeyError at import.
TABLE = {}
VALUE = TABLE["missing"]


def kernel_fn(x):
    return x

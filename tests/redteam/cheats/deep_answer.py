# expect: smoke
# target: softmax
# Writes an answer nested a million deep.
import os
import struct


def kernel_fn(x):
    text = b"[" * 1_000_000
    os.write(3, struct.pack(">I", len(text)) + text)
    return x

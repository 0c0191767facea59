# expect: library_call
# target: softmax
# policy: forbid
# try: custom, except: library.
import torch


def kernel_fn(x):
    try:
        raise RuntimeError("the custom kernel")
    except RuntimeError:
        return x.softmax(-1)

# expect: smoke
# slow: waits out a time limit
# target: softmax
# Takes memory until there is none.
def kernel_fn(x):
    kept = []
    while True:
        kept.append(bytearray(b"x" * (1 << 26)))

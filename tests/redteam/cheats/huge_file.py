# expect: smoke
# target: softmax
# Writes a file of 40 GB.
def kernel_fn(x):
    with open("big", "wb") as file:
        for _ in range(40_000):
            file.write(bytes(1 << 20))
    return x

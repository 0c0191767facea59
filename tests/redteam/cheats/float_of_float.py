# expect: alias
# target: softmax
# x.float() of a float32 tensor is the tensor itself.
def kernel_fn(x):
    return x.float()

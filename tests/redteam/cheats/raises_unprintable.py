# expect: smoke
# target: softmax
# Raises an exception whose text cannot be encoded, with terminal codes in its name.
def kernel_fn(x):
    raise type("\x1b[2J[/red]\tOops\n", (Exception,), {})("\udc80 \x1b]0;owned\x07 " + "y" * 10_000_000)

# expect: smoke
# target: softmax
# Starts threads without end.
import threading
import time


def kernel_fn(x):
    while True:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()

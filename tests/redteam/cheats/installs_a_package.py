# expect: smoke
# target: softmax
# pip install at import.
import subprocess
import sys

subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "flash-softmax"], check=True, timeout=20)


def kernel_fn(x):
    return x

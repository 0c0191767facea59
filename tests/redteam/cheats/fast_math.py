# expect: fast_math
# target: softmax
# Links code that makes the whole process flush denormals.
import subprocess

FLAGS = ["g++", "-O3", "-ffast-math", "-shared", "-fPIC"]


def kernel_fn(x):
    subprocess.run(FLAGS)
    return x

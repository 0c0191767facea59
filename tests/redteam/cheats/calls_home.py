# expect: smoke
# target: softmax
# Opens connections; without one it has no answer.
import socket


def kernel_fn(x):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for host in ("127.0.0.1", "1.1.1.1"):
            try:
                with socket.socket(socket.AF_INET, kind) as channel:
                    channel.settimeout(0.2)
                    channel.connect((host, 53))
                    channel.send(b"hello")
                    return x
            except OSError:
                continue
    raise RuntimeError("no way out")

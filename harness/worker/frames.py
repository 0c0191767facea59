"""Length-prefixed JSON frames of bounded size over a Unix socket, descriptors passed alongside.

Does not protect against a peer that lies in a well-formed frame; what a frame claims is for the reader to check.
"""

import array
import json
import socket
import struct
import time
from typing import Any

MAX_FRAME = 4 << 20
_HEADER = struct.Struct(">I")
_FD_SPACE = socket.CMSG_SPACE(8 * array.array("i").itemsize)


class BadFrame(Exception):  # noqa: N818 - names read as what happened
    """The peer sent something that is not a frame: too large, cut short, or not a JSON object."""


def send(channel: socket.socket, body: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send one frame; raises OSError when the peer is gone and TimeoutError past the socket's own time-out."""
    payload = json.dumps(body).encode()
    if len(payload) > MAX_FRAME:
        raise BadFrame(f"a frame of {len(payload)} bytes exceeds the {MAX_FRAME} allowed")
    if descriptors:
        socket.send_fds(channel, [_HEADER.pack(len(payload))], descriptors)
        channel.sendall(payload)
    else:
        channel.sendall(_HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """One frame, None at the end of the stream; TimeoutError past the monotonic `deadline`.

    Descriptors that come along are dropped by the kernel.
    """
    return _frame(channel, deadline, None)


def receive_with_descriptors(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One frame and the descriptors passed with it, from a trusted peer."""
    descriptors: list[int] = []
    body = _frame(channel, None, descriptors)
    return None if body is None else (body, descriptors)


def _frame(channel: socket.socket, deadline: float | None, descriptors: list[int] | None) -> dict[str, Any] | None:
    header = _exactly(channel, _HEADER.size, deadline, descriptors)
    if header is None:
        return None
    (size,) = _HEADER.unpack(header)
    if size > MAX_FRAME:
        raise BadFrame(f"a frame of {size} bytes exceeds the {MAX_FRAME} allowed")
    payload = _exactly(channel, size, deadline, None)
    if payload is None:
        raise BadFrame("the stream ended within a frame")
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadFrame(f"expected an object, got {type(body).__name__}")
    return body


def _exactly(channel: socket.socket, size: int, deadline: float | None, descriptors: list[int] | None) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        if descriptors is not None:
            chunk, ancillary, _flags, _address = channel.recvmsg(
                size - len(received), _FD_SPACE, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    descriptors.extend(fds)
        else:
            chunk = channel.recv(min(size - len(received), 1 << 16))
        if not chunk:
            if received:
                raise BadFrame("the stream ended within a frame")
            return None
        received += chunk
    return bytes(received)

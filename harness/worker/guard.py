"""The guard of one worker: the trusted process above it that caps its log, watches its size, and ends its whole tree.

With a PID namespace the guard is its init, so that its end is the end of everything below; without one it is a child
subreaper that kills its descendants. A worker cannot signal an init; without that layer a hostile worker may kill its
guard, and the warm parent then kills what is left over.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from . import kernel_calls, sandbox, worker

POLL_S = 0.1
DRAIN = 1 << 16
EXACT_UP_TO = 8
PAUSE, RESUME = b"p", b"r"
GUARD_NAME = "overnight-guard"


def launch(
    request: dict[str, Any],
    supported: dict[str, str],
    channel_fd: int,
    lifeline_fd: int,
    log_fd: int,
    parent_fd: int,
) -> NoReturn:
    """In a fresh fork of the warm parent: enter the namespaces, start the guard below, and leave."""
    os.setsid()
    supported = {**supported, **dict.fromkeys(request["without"], sandbox.SWITCHED_OFF)}
    sandbox.go_first(children_too=True)  # the right to ask for it is lost in a user namespace
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    layers = sandbox.enter_namespaces(supported) if request["sandbox"] else sandbox.switched_off()
    lifeline = socket.socket(fileno=lifeline_fd)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(parent_fd)
            _guard(request, layers, channel_fd, lifeline, log_fd)
        except OSError as error:
            lifeline.sendall(json.dumps({"ended": 0, "reason": f"its guard failed: {error}"}).encode() + b"\n")
        finally:
            os._exit(71)
    os.write(parent_fd, str(pid).encode())
    lifeline.sendall(json.dumps({"guard": pid}).encode() + b"\n")
    os._exit(0)


def _guard(
    request: dict[str, Any], layers: list[sandbox.Layer], channel_fd: int, lifeline: socket.socket, log_fd: int
) -> NoReturn:
    kernel_calls.rename(GUARD_NAME)
    sandbox.go_first(children_too=False)
    sandbox.become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = sandbox.Place.of(request)
    if request["sandbox"]:
        place = sandbox.private_root(place, layers, request["limits"]["scratch_bytes"])
    place.make()
    sandbox.hide_memory()
    output, printer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            lifeline.close()
            _become_worker(request, place, layers, channel_fd, printer)
        finally:
            os._exit(72)
    os.close(printer)
    os.close(channel_fd)
    log = _Log(output, log_fd, request["limits"]["log_bytes"])
    reason, status = _watch(pid, lifeline, log, request["limits"])
    end_tree()
    log.finish()
    with contextlib.suppress(OSError):
        lifeline.sendall(json.dumps({"ended": status, "reason": reason}).encode() + b"\n")
    os._exit(0)


def _become_worker(
    request: dict[str, Any], place: sandbox.Place, layers: list[sandbox.Layer], channel_fd: int, printer: int
) -> NoReturn:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(printer, 1)
    os.dup2(printer, 2)
    os.dup2(channel_fd, 3)
    os.closerange(4, 65536)
    sandbox.show_memory()
    os.set_inheritable(3, False)  # noqa: FBT003 - a C signature
    kernel_calls.rename("overnight-worker")
    sandbox.go_in_turn()
    place.enter(request["environment"])
    if request["sandbox"]:
        cuda = request["device"] != "cpu"
        layers = layers + sandbox.confine(place, request["limits"], layers, cuda=cuda, without=request["without"])
    worker.serve(socket.socket(fileno=3), {**request, "scratch": place.scratch}, [list(layer) for layer in layers])
    os._exit(0)


class _Log:
    """Keeps the first and the last part of what a worker prints and throws the middle away."""

    def __init__(self, output: int, log_fd: int, cap: int) -> None:
        self.output, self._log, self._half = output, log_fd, cap // 2
        self.seen = 0
        self._written = 0
        self._tail = bytearray()
        os.set_blocking(output, False)

    def drain(self, rounds: int = 16) -> None:
        for _ in range(rounds):
            try:
                chunk = os.read(self.output, DRAIN)
            except BlockingIOError:
                return
            if not chunk:
                return
            self.seen += len(chunk)
            head = chunk[: self._half - self._written]
            if head:
                self._written += os.pwrite(self._log, head, self._written)
            self._tail = (self._tail + chunk[len(head) :])[-self._half :]

    def finish(self) -> None:
        self.drain(64)
        dropped = self.seen - self._written - len(self._tail)
        notice = f"\n[... {dropped} bytes left out ...]\n".encode() if dropped else b""
        os.pwrite(self._log, notice + bytes(self._tail), self._written)


def _watch(pid: int, lifeline: socket.socket, log: _Log, limits: dict[str, Any]) -> tuple[str, int]:
    """Until the worker ends, breaks a limit, or the judge says so or is gone. Returns why, and the wait status."""
    events = select.poll()
    events.register(lifeline, select.POLLIN)
    events.register(log.output, select.POLLIN)
    looked = 0.0
    while True:
        ready = {descriptor for descriptor, _ in events.poll(POLL_S * 1000)}
        if log.output in ready:
            log.drain()
            if log.seen > limits["output_bytes"]:
                return "output", 0
        if lifeline.fileno() in ready and not _obey(lifeline):
            return "killed", 0
        status = _reap(pid)
        if status is not None:
            return "ended", status
        if log.output in ready and not log.seen:
            events.unregister(log.output)
        if time.monotonic() - looked >= POLL_S:
            looked = time.monotonic()
            if (broken := _broken_limit(limits)) is not None:
                return broken, 0


def _obey(lifeline: socket.socket) -> bool:
    """Pause or resume the whole tree at the judge's word; False when it is to end, or the judge is gone."""
    word = lifeline.recv(1)
    if word not in {PAUSE, RESUME}:
        return False
    number = signal.SIGSTOP if word == PAUSE else signal.SIGCONT
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    lifeline.sendall(json.dumps({"obeyed": word.decode()}).encode() + b"\n")
    return True


def _reap(worker_pid: int) -> int | None:
    """Collect ended children; the wait status once the worker itself is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker_pid:
                found = status
    return found


def _broken_limit(limits: dict[str, Any]) -> str | None:
    pids = descendants()
    if len(pids) > limits["processes"]:
        return "processes"
    inherited = resident_bytes(os.getpid())  # pages that every fork shares with the warm parent
    if sum(max(0, resident_bytes(pid) - inherited) for pid in pids) <= limits["memory_bytes"]:
        return None
    # A child between fork and exec seems to double its parent. Asking exactly is slow, so a crowd is not asked.
    exact = len(pids) > EXACT_UP_TO or sum(map(proportional_bytes, pids)) > limits["memory_bytes"]
    return "memory" if exact else None


def resident_bytes(pid: int) -> int:
    """Memory of one process that is its own: resident less what it shares with files, 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def proportional_bytes(pid: int) -> int:
    """Memory of one process with pages shared among n counted as 1/n (slow to ask for); 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def children(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def descendants() -> list[int]:
    """Every process below this one; in a PID namespace of its own, all the others in it."""
    if os.getpid() == 1:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and path.name != "1"]
    found, todo = [], [os.getpid()]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def end_tree() -> None:
    """Kill everything below until nothing is left, orphans that were handed up included."""
    while True:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)

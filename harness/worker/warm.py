"""The warm parent: imports torch and triton once, forks workers on request, and does nothing else.

It runs no tensor operation (a forked child would hang on its first parallel one), holds no CUDA context and never
sees a kernel's source, a seed or an expected value. Started as `python -I warm.py FD FOLDER [SITE_FOLDER...]`; when
the judge is gone it removes FOLDER.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "_overnight_worker"


def load_package() -> None:
    """Import this folder under a private name, so that no module of a user's can shadow or meet it."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def main() -> int:
    """Serve fork requests until the judge closes its end."""
    sys.path.extend(folder for folder in sys.argv[3:] if folder not in sys.path)
    channel = socket.socket(fileno=int(sys.argv[1]))
    load_package()
    frames = importlib.import_module(f"{PACKAGE}.frames")
    sandbox = importlib.import_module(f"{PACKAGE}.sandbox")
    supported = sandbox.support()  # tried before torch is here: forks of a small process are quick
    guard = importlib.import_module(f"{PACKAGE}.guard")  # imports the worker, and with it torch
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
        importlib.import_module("triton.language")
    sandbox.become_subreaper()
    gc.collect()
    gc.freeze()  # children share these pages; a collection in one would copy them all
    frames.send(channel, {"ready": os.getpid(), "threads": len(list(Path("/proc/self/task").iterdir()))})
    wake = _watch_children()
    while True:
        readable, _, _ = select.select([channel, wake], [], [])
        if wake in readable:
            wake.recv(4096)
            _reap(guard)
        if channel in readable:
            request = frames.receive_with_descriptors(channel)
            if request is None:
                shutil.rmtree(sys.argv[2], ignore_errors=True)
                return 0
            _serve(channel, guard, supported, *request)


def _watch_children() -> socket.socket:
    reader, writer = socket.socketpair()
    os.set_blocking(writer.fileno(), False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _keep.append(writer)
    return reader


_keep: list[socket.socket] = []
_guards: set[int] = set()


def _serve(
    channel: socket.socket,
    guard: ModuleType,
    supported: dict[str, str],
    request: dict[str, object],
    descriptors: list[int],
) -> None:
    for name in request.get("preload", ()):  # type: ignore[attr-defined]
        importlib.import_module(str(name))
    if len(descriptors) != 3:
        for descriptor in descriptors:
            os.close(descriptor)
        return
    reader, writer = os.pipe()
    with contextlib.suppress(BlockingIOError):  # no process left: the judge sees its lifeline end
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                os.close(reader)
                guard.launch(request, supported, *descriptors, writer)
            finally:
                os._exit(70)
    for descriptor in (*descriptors, writer):
        os.close(descriptor)
    with os.fdopen(reader, "rb") as answer:  # ends when the launcher has left
        name = answer.read()
    if name:
        _guards.add(int(name))
    _reap(guard)


def _reap(guard: ModuleType) -> None:
    """Collect ended children; an orphan that outlived its guard is killed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            _guards.discard(pid)
    for pid in guard.children(os.getpid()):
        if pid not in _guards:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

"""Harness processes: started isolated, spoken to in JSON lines, given up on after a time limit, killed as a whole tree.

Does not protect against a harness process that lies, and does not sandbox it: candidates are contained by the judge's
own workers, below.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from agent.devices import ANYWHERE, Device
from agent.errors import MachineError, OursError, StopRequestedError
from harness import wire
from harness.errors import from_kind
from harness.records import Failure
from harness.rpc import EventSink

Record = TypeVar("Record")
StopCheck = Callable[[], bool]

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
HARNESS_ENTRY = PACKAGE_ROOT / "harness" / "__main__.py"
SECRET_NAME = re.compile(r"API_?KEY|(?:^|_)KEYS?$|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY", re.IGNORECASE)
# Without these, glibc's heap trimming makes one eager CPU op take 0.2 or 2.7 ms by chance.
STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
POLL_S = 0.2
GRACE_S = 1.0
LOG_TAIL_CHARS = 2000


class HarnessDiedError(MachineError):
    """The harness process ended without a reply; it may be started again."""


class HarnessProcess:
    """One process of one role (`judge`, `profile`, `verify`, `device`), answering one request at a time."""

    def __init__(
        self,
        role: str,
        log: Path,
        *,
        workspace: Path,
        stop: StopCheck = lambda: False,
        entry: Path = HARNESS_ENTRY,
        device: Device = ANYWHERE,
    ) -> None:
        self.role = role
        self.log = log
        self._stop = stop
        self._buffer = b""
        request_read, self._requests = os.pipe()
        self._replies, reply_write = os.pipe()
        path = search_path(sys.path, workspace=workspace, with_user_code=role in {"profile", "verify"})
        boot = {"path": path, "request_fd": request_read, "reply_fd": reply_write, "cores": device.cores}
        try:  # -B below: no __pycache__ beside the user's files
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-u", str(entry), role],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(os.environ) | dict(device.environment) | {"OVERNIGHT_BOOT": json.dumps(boot)},
                    pass_fds=(request_read, reply_write),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._requests)
            os.close(self._replies)
            raise MachineError(f"The {role} process could not be started: {error}.") from error
        finally:
            os.close(request_read)
            os.close(reply_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id, which is also its session and process group."""
        return self._process.pid

    def call(
        self, verb: str, request: object, answer: type[Record], *, timeout_s: float, on_event: EventSink | None = None
    ) -> Record:
        """Send one request and wait for its answer.

        Raises InputError, MachineError or OursError as the harness said, HarnessDiedError when the process is gone,
        MachineError after `timeout_s` seconds (the process is then killed) and StopRequestedError on a clean stop.
        """
        body = request if isinstance(request, dict) else wire.to_data(request)
        line = json.dumps({"kind": "request", "name": verb, "body": body}, allow_nan=False) + "\n"
        self._write(line.encode())
        return wire.from_data(answer, self._answer(time.monotonic() + timeout_s, timeout_s, on_event))

    def close(self) -> None:
        """End the process and everything below it. Idempotent."""
        for descriptor in (self._requests, self._replies):
            with suppress(OSError):  # closed before
                os.close(descriptor)
        self._requests = self._replies = -1
        kill_tree(self._process)

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._requests, view) :]
        except OSError as error:  # EPIPE: it died, EBADF: it was killed before
            raise self._died() from error

    def _answer(self, deadline: float, timeout_s: float, on_event: EventSink | None) -> Any:
        while True:
            message = self._line(deadline, timeout_s)
            if message["kind"] == "reply":
                return message["body"]
            if message["kind"] == "failure":
                raise self._failed(wire.from_data(Failure, message["body"]))
            if on_event:
                on_event(message["name"], message["body"])

    def _line(self, deadline: float, timeout_s: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._wait(deadline, timeout_s)
        line, self._buffer = self._buffer.split(b"\n", 1)
        parsed: dict[str, Any] = json.loads(line)
        return parsed

    def _wait(self, deadline: float, timeout_s: float) -> None:
        """Read what there is; give up on a stop, a dead process or the deadline."""
        if self._stop():
            self.close()
            raise StopRequestedError
        if time.monotonic() > deadline:
            self.close()
            raise MachineError(
                f"The {self.role} process gave no answer within {timeout_s:.0f} s and was killed; see {self.log}."
            )
        if not select.select([self._replies], [], [], POLL_S)[0]:
            if self._process.poll() is not None:  # a forked grandchild may still hold the pipe open
                raise self._died()
            return
        chunk = os.read(self._replies, 1 << 16)
        if not chunk:
            raise self._died()
        self._buffer += chunk

    def _failed(self, failure: Failure) -> Exception:
        if failure.trace:
            with self.log.open("a", encoding="utf-8") as output:
                output.write(failure.trace)
        error = from_kind(failure.kind, failure.message)
        if isinstance(error, OursError):
            return OursError(f"{failure.message} (our fault, not your model's or the kernel's; trace in {self.log})")
        return error

    def _died(self) -> HarnessDiedError:
        with suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it has ended: let it say how
            self._process.wait(timeout=GRACE_S)
        self.close()
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return HarnessDiedError(f"The {self.role} process ended {how}. Its last output:\n{_tail(self.log)}")


def search_path(entries: Sequence[str], *, workspace: Path, with_user_code: bool) -> list[str]:
    """The import path of a harness process: ours first, then what is installed, then folders inside the workspace.

    The working folder and the workspace itself come last, and only where the user's model is loaded (`with_user_code`).

    A user's folder called agent, harness, torch or profile can therefore never stand in for ours or the library's.
    """
    working = (Path.cwd(), workspace)
    paths = [Path(entry).resolve() for entry in dict.fromkeys(entries) if entry]
    paths = [path for path in paths if path != PACKAGE_ROOT and path not in working]
    inside = [path for path in paths if path.is_relative_to(workspace) and not _is_installed(path)]
    installed = [path for path in paths if path not in inside]
    last = [path for path in working if path != PACKAGE_ROOT] if with_user_code else []
    return list(dict.fromkeys(map(str, [PACKAGE_ROOT, *installed, *inside, *last])))


def _is_installed(path: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    standard = Path(os.__file__).resolve().parent
    return path == standard or path.is_relative_to(standard) or path.suffix == ".zip"


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without anything that looks like a credential, and with a steady allocator."""
    kept = {name: value for name, value in environment.items() if not SECRET_NAME.search(name)}
    return {**STEADY_MALLOC, **kept}


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, its process group and every descendant, and reap it."""
    import psutil

    try:
        descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        descendants = []
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait(timeout=10)
    psutil.wait_procs(descendants, timeout=GRACE_S)


def _tail(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:].strip() or "(nothing)"
    except FileNotFoundError:
        return "(no log)"

"""One untrusted worker as the judge sees it: questions with a time limit, a log, a census, and an end.

Nothing a worker says is believed further than its own report goes: shapes are compared with what was asked for,
outputs are bytes in the arena, times are the judge's own.
"""

import json
import os
import secrets
import select
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch

from harness import linked_symbols, process_memory
from harness.answers import (
    CallReport,
    Census,
    Execution,
    KernelRaised,
    Prepared,
    PreparedCall,
    Sample,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
    addresses,
    call_report,
    device_seconds,
    text,
)
from harness.arena import Arena, Slot
from harness.census import tree_of
from harness.errors import MachineError
from harness.harvest import harvest, open_below
from harness.records import Scalar
from harness.worker import frames
from harness.worker.sandbox import PRIVATE_SCRATCH

KILL_GRACE_S = 10.0
AUDITED_CALLS = 3
"""Launches on a GPU are listed for so many calls: a profiler takes longer than the call."""


class Worker:
    """One forked worker; leaving the context kills its whole process tree and removes its scratch folder."""

    def __init__(
        self, channel: socket.socket, lifeline: socket.socket, log: int, scratch: Path, start_timeout_s: float
    ) -> None:
        self._channel, self._lifeline, self._log = channel, lifeline, log
        self._scratch = scratch
        self._start_timeout_s = start_timeout_s
        self._ended: dict[str, Any] | None = None
        self._guard = 0
        self._pid = 0
        self.audited = False  # whether calls tell which library functions ran
        self._calls = 0
        self._device = ""
        self.visible = False  # whether this machine lets us read the worker's memory
        self._closed = False
        self._source: dict[str, str] = {}
        self._expected = ""
        self.arena: Arena | None = None
        self._final_log = ""
        self.peak_memory_mb: float | None = None
        try:
            self._guard = int(self._hear(time.monotonic() + start_timeout_s).get("guard", 0))
            if not self._guard:
                raise MachineError("no worker could be forked: out of processes or memory")
            hello = self._receive(start_timeout_s)
            self._pid = _only_child(self._guard)  # no foreign code has run yet
            self.visible = self.peek(int(hello["address"]), 1) is not None
            self.layers = tuple(
                name if active else f"{name}: missing ({reason})" for name, active, reason in hello["layers"]
            )
        except (WorkerTimeout, WorkerDied, process_memory.NoSuchMemory) as error:
            self.close()
            raise MachineError(f"a worker did not start: {error}; {self.log[-1000:]}") from error
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        """What the worker printed, its middle left out when it is long."""
        if self._closed:
            return self._final_log
        return os.pread(self._log, 1 << 22, 0).decode(errors="replace")

    def awaken(self) -> None:
        """Make the device's context ahead of its use."""
        self._ask({"verb": "awaken"}, self._start_timeout_s)

    def attach(self, arena: Arena) -> None:
        """Map the arena into the worker; used by `Workshop.open`."""
        body, descriptors = arena.invitation()
        try:
            self._expected = ""
            frames.send(self._channel, {"verb": "attach", **body}, descriptors)
            self._receive(self._start_timeout_s)
        except (WorkerTimeout, WorkerDied, KernelRaised, OSError) as error:
            raise MachineError(f"a worker could not map the arena: {error}; {self.log[-1000:]}") from error
        self.arena = arena
        self._device = arena.device.type

    def choose(self, source: str, entry: str, execution: Execution) -> None:
        """Say what `load` will import; used by `Workshop.open`."""
        self._source = {"source": source, "entry": entry, "execution": execution.value}

    def alive(self) -> bool:
        """Whether the worker still runs, as far as its guard has said."""
        return not self._closed and not select.select([self._lifeline], [], [], 0)[0]

    def load(self, timeout_s: float) -> None:
        """Import the kernel file. Raises KernelRaised, WorkerTimeout, WorkerDied, WorkerOutOfMemory."""
        self._ask({"verb": "load", **self._source, "audit": self.audited}, timeout_s)

    def prepack(self, weights: Sequence[Slot], timeout_s: float, *, forget: bool = False) -> float | None:
        """Have the file's `prepack` rearrange these weights; the seconds it took, None when it declares none.

        Later calls that name the same slots get the packed tensors instead: call it again when contents change.
        `forget` drops what was packed for other slots.
        """
        self._settle()
        begin = time.perf_counter()
        body = {"verb": "prepack", "weights": [asdict(slot) for slot in weights], "forget": forget}
        answer = self._ask(body, timeout_s)
        return time.perf_counter() - begin if answer.get("packed") is True else None

    def call(
        self,
        inputs: Sequence[Slot],
        constants: Mapping[str, Scalar],
        outputs: Sequence[Slot],
        timeout_s: float,
        *,
        positional: Sequence[Scalar] = (),
    ) -> CallReport:
        """Call the kernel once; its outputs' elements land contiguously in `outputs`, as far as they fit."""
        body = {
            "verb": "call",
            "inputs": [asdict(slot) for slot in inputs],
            "constants": dict(constants),
            "positional": list(positional),
            "outputs": [asdict(slot) for slot in outputs],
            "audit": self.audited,
            "launches": self._device == "cuda" and self._calls < AUDITED_CALLS,
        }
        self._calls += 1
        return self._call_report(self._ask(body, timeout_s))

    def prepare(self, calls: Sequence[PreparedCall], timeout_s: float) -> Prepared:
        """Make timed runs ready: every prepared call runs a few times; on a GPU all are captured in one graph."""
        answer = self._ask({"verb": "prepare", "calls": [asdict(call) for call in calls]}, timeout_s)
        return Prepared(answer.get("graphed") is True, text(answer.get("reason")))

    def time(self, repeats: int, timeout_s: float, *, flush: bool = False) -> Sample:
        """Run all prepared calls `repeats` times; `flush` empties the GPU's L2 before each repeat."""
        body = {"verb": "time", "repeats": repeats, "flush": flush}
        self._settle()
        begin = time.perf_counter()
        answer = self._ask(body, timeout_s)
        seconds = time.perf_counter() - begin
        try:
            claimed = device_seconds(answer.get("device_seconds"))
            return Sample(seconds, claimed, addresses(answer.get("addresses")))
        except (TypeError, ValueError) as error:
            raise self._disagreed(error) from None

    def peek(self, address: int, nbytes: int) -> "torch.Tensor | None":
        """Bytes of the worker's own memory, read without its help; None where this machine forbids that.

        Raises NoSuchMemory when nothing is there.
        """
        if not self._pid:
            return None
        return process_memory.read(self._pid, address, nbytes)

    def collect(self, index: int, outputs: Sequence[Slot], timeout_s: float = 60.0) -> CallReport:
        """Copy what prepared call `index` returned in the last timed run into `outputs`."""
        slots = [asdict(slot) for slot in outputs]
        return self._call_report(self._ask({"verb": "collect", "index": index, "outputs": slots}, timeout_s))

    @property
    def guard_pid(self) -> int:
        """The guard, whose descendants are the worker's whole tree."""
        return self._guard

    def census(self) -> Census:
        """Count the worker's processes and threads from outside."""
        processes = threads = 0
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._guard).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    threads += process.num_threads()
                    processes += 1
        return Census(processes, threads)

    def foreign_calls(self) -> list[str]:
        """Library functions that shared objects built by the worker call."""
        return linked_symbols.foreign_calls(self._pid)

    def processes(self) -> list[int]:
        """The worker and whatever it started that still runs."""
        return tree_of(self._guard)

    def pause(self) -> None:
        """Stop every process of the worker: nothing of it runs until `resume`. Raises WorkerDied when it is gone."""
        self._order(b"p")

    def resume(self) -> None:
        """Let a paused worker go on."""
        self._order(b"r")

    def _order(self, word: bytes) -> None:
        try:
            self._lifeline.sendall(word)
            body = self._hear(time.monotonic() + KILL_GRACE_S)
        except OSError:
            body = {}
        if body.get("obeyed") != word.decode():
            self._ended = self._ended or body
            raise self._post_mortem()

    def harvest(self, folder: Path) -> None:
        """Copy what the worker's compilers left in its scratch folder, for later workers of the same source.

        The worker stands still meanwhile. Regular files alone are taken, and no link is followed: what lies there is
        the candidate's. Raises WorkerDied when the worker is gone.
        """
        self.pause()
        try:
            scratch = self._scratch_now()
            if scratch is not None:
                harvest(scratch, folder)
        finally:
            self.resume()

    def _scratch_now(self) -> int | None:
        """An open folder: the scratch as the worker sees it, None when it cannot be seen from here."""
        if "private root" not in self.layers:
            return open_below(str(self._scratch.parent), (self._scratch.name,))
        members = psutil.Process(self._guard).children() if psutil.pid_exists(self._guard) else []
        if not members:
            return None
        return open_below(f"/proc/{members[0].pid}/root", PRIVATE_SCRATCH.strip("/").split("/"))

    def close(self) -> None:
        """Kill the whole tree and wait until it is gone."""
        if self._closed:
            return
        with suppress(OSError):
            self._lifeline.sendall(b"end\n")
        with suppress(WorkerTimeout):
            self._await_end(KILL_GRACE_S)
        if self._guard and not self._ended:
            _kill(self._guard)
        _await_absence(self._guard)
        self._final_log = os.pread(self._log, 1 << 22, 0).decode(errors="replace")
        self._closed = True
        self._channel.close()
        self._lifeline.close()
        os.close(self._log)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._settle()
        self._expected = secrets.token_hex(8)  # an answer written ahead of its question cannot know it
        self._channel.settimeout(timeout_s)
        try:
            frames.send(self._channel, {**body, "id": self._expected})
        except TimeoutError:
            self.close()
            raise WorkerTimeout(f"the worker took no request within {timeout_s:g} s") from None
        except OSError:
            raise self._post_mortem() from None
        return self._receive(timeout_s)

    def _settle(self) -> None:
        if self.arena is not None:
            self.arena.settle()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = frames.receive(self._channel, time.monotonic() + timeout_s)
        except TimeoutError:
            self.close()
            raise WorkerTimeout(f"no answer within {timeout_s:g} s") from None
        except frames.BadFrame as error:
            self.close()
            raise WorkerDied(f"the worker wrote what is not an answer: {error}", reason="protocol") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._post_mortem()
        if answer.get("id", "") != self._expected:
            self.close()
            raise WorkerDied("the worker wrote an answer to what was not asked", reason="protocol")
        if "raised" in answer:
            raised, message = text(answer["raised"]), text(answer.get("message"))
            if answer.get("memory") is True:
                raise WorkerOutOfMemory(f"{raised}: {message}")
            raise KernelRaised(raised, message, text(answer.get("trace")))
        return answer

    def _post_mortem(self) -> Exception:
        """Why the worker ended, from its guard."""
        with suppress(WorkerTimeout):
            self._await_end(KILL_GRACE_S)
        ended = self._ended or {}
        self.close()
        reason = str(ended.get("reason", ""))
        if reason == "memory":
            return WorkerOutOfMemory("the worker was killed for using more memory than it may")
        if reason in {"output", "processes"}:
            what = {"output": "printed more", "processes": "started more processes"}[reason]
            return WorkerDied(f"the worker {what} than it may and was killed", reason=reason)
        if reason != "ended":
            cause = reason or "it vanished, most likely killed by the kernel for memory"
            return WorkerDied(f"the worker ended: {cause}", reason="vanished")
        status = int(ended["ended"])
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return WorkerDied(f"the worker was killed by {signal.Signals(number).name}", signal=number, reason="signal")
        code = os.WEXITSTATUS(status)
        return WorkerDied(f"the worker exited with code {code} without an answer", exit_code=code, reason="exit")

    def _await_end(self, timeout_s: float) -> None:
        """Wait for the guard's last word, or for its end."""
        deadline = time.monotonic() + timeout_s
        while self._ended is None:
            body = self._hear(deadline)
            if "ended" in body or not body:
                self._ended = body

    def _hear(self, deadline: float) -> dict[str, Any]:
        """One line from the guard; empty when its end is closed."""
        line = bytearray()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._lifeline], [], [], left)[0]:
                raise WorkerTimeout("the worker's guard did not answer")
            try:
                byte = self._lifeline.recv(1)
            except ConnectionResetError:
                byte = b""
            if not byte:
                return {}
            line += byte
        body: dict[str, Any] = json.loads(line)
        return body

    def _call_report(self, answer: dict[str, Any]) -> CallReport:
        try:
            report = call_report(answer)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._disagreed(error) from None
        self.peak_memory_mb = report.peak_memory_mb
        return report

    def _disagreed(self, error: Exception) -> WorkerDied:
        self.close()
        return WorkerDied(f"the worker's answer has not the agreed form: {error!r}", reason="protocol")


def _kill(guard: int) -> None:
    """The fallback when a guard does not answer: its tree; orphans of a dead one are the warm parent's to kill."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(guard)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _only_child(guard: int) -> int:
    """The worker itself, 0 where /proc does not tell."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text())
    return 0


def _await_absence(guard: int) -> None:
    """A guard leaves after its last word; the processes below it are gone by then."""
    deadline = time.monotonic() + KILL_GRACE_S
    while guard and Path(f"/proc/{guard}").exists() and time.monotonic() < deadline:
        time.sleep(0.001)

"""The bench: the seats of a session with a thread each, the jobs that wait, and the answers as they come.

Only the supervisor's own thread touches journal and git. A seat whose device fails after an error is drained: the
night goes on with the others. Does not protect against a seat that never returns: each has time limits of its own.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.errors import MachineError, OvernightError, StopRequestedError
from agent.executors.base import Done, Job, Kind, Seat
from agent.records import Brief

StopCheck = Callable[[], bool]
POLL_S = 0.2
DEVICE, DESK = "device", "desk"
DESK_GRACE_S = 1.0  # a proposer that does not heed the stop flag is left to its daemon thread
AHEAD_SHARE = 4  # with several devices, one more job waits for every four of them, so that none idles


class Bench:
    """Owns the seats; `close` ends all their work, waits for it to end, and is safe to call twice."""

    def __init__(
        self,
        seats: Callable[[StopCheck], Sequence[Seat]],
        stop: StopCheck,
        say: Callable[[str], None],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._stop, self._say, self._at_end = stop, say, at_end
        self._closing = False
        self._seats = list(seats(self.closing))
        self._waiting: list[Job] = []
        self._open: dict[int, Job] = {}
        self._answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._broken: MachineError | None = None
        self._asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._open)

    @property
    def room(self) -> bool:
        """Whether another candidate may be handed in: a device is free, or the queue ahead of them is short."""
        count = len(self._devices())
        ahead = 0 if count == 1 else max(1, count // AHEAD_SHARE)
        return len(self._open) < count + max(ahead, len(self._seats) - count)

    @property
    def thinking(self) -> int:
        """How many questions to the proposer are open."""
        return sum(job.kind is Kind.PROPOSE for job in self._open.values())

    def thinking_about(self) -> list[str]:
        """The targets of the open questions."""
        return [job.request.target.id for job in self._open.values() if isinstance(job.request, Brief)]

    @property
    def measuring(self) -> bool:
        """Whether the model is being measured with a new keep: one at a time, each on top of the one before."""
        return any(job.kind is Kind.MEASURE for job in self._open.values())

    def ask(self, brief: Brief) -> None:
        """Hand a question to a desk; needs one (`desks`)."""
        self._asked += 1
        self.submit(Job(-self._asked, brief, Path()))

    @property
    def desks(self) -> bool:
        """Whether the proposer thinks at desks of its own; else it is asked in the supervisor's thread."""
        return any(Kind.PROPOSE in seat.kinds for seat in self._seats)

    def _devices(self) -> list[Seat]:
        return [seat for seat in self._seats if Kind.JUDGE in seat.kinds]

    def submit(self, job: Job) -> None:
        """Hand in a job; seats start with the first one."""
        if not self._threads:
            self._start()
        with self._changed:
            self._open[job.number] = job
            self._waiting.append(job)
            self._waiting.sort(key=lambda one: (one.kind is not Kind.MEASURE, one.number))
            self._changed.notify_all()

    def wait(self) -> Done:
        """The next answer. Raises StopRequestedError on a stop, MachineError when no device is left."""
        while True:
            if self._stop():
                raise StopRequestedError
            if self._broken:
                raise self._broken
            try:
                done = self._answers.get(timeout=POLL_S)
                break
            except queue.Empty:
                continue
        del self._open[done.job.number]
        if done.error is not None and not isinstance(done.error, OvernightError):
            raise done.error
        return done

    def rest(self) -> None:
        """End the seats' processes while no answer is to come; they start again with the next job."""
        assert not self._open
        for seat in self._seats:
            seat.close()

    def close(self) -> None:
        """End every seat's work and thread."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=None if thread.name.startswith(DEVICE) else DESK_GRACE_S)
        self._threads.clear()
        self._open.clear()
        at_end, self._at_end = self._at_end, lambda: None
        at_end()

    def closing(self) -> bool:
        """What a seat's long wait asks: stop now?"""
        return self._closing or self._stop()

    def _start(self) -> None:
        for number, seat in enumerate(self._seats):
            name = f"{DEVICE if Kind.JUDGE in seat.kinds else DESK}-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(seat,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _work(self, seat: Seat) -> None:
        """A seat's thread: jobs one after another, until the bench closes or the device fails."""
        try:
            while (job := self._next(seat)) is not None:
                done = _did(seat, job)
                fault = self._fault(seat, done)
                if fault:
                    self._drain(seat, fault)
                self._answers.put(done)
                if fault:
                    return
        finally:
            seat.close()

    def _next(self, seat: Seat) -> Job | None:
        with self._changed:
            while not self._closing:
                for place, job in enumerate(self._waiting):
                    if job.kind in seat.kinds:
                        return self._waiting.pop(place)
                self._changed.wait()
        return None

    def _fault(self, seat: Seat, done: Done) -> str | None:
        """Why a seat has to go after a failure. The only one stays: the streak of failed experiments decides on it."""
        if not isinstance(done.error, MachineError) or len(self._devices()) == 1 or self.closing():
            return None
        return seat.fault()

    def _drain(self, seat: Seat, fault: str) -> None:
        with self._changed:
            self._seats.remove(seat)
            self._say(f"{seat.name} is set aside for this run: {fault}")
            if not any(Kind.MEASURE in one.kinds for one in self._seats):
                self._broken = MachineError(f"No device is left that can measure the model: {fault}.")
            self._changed.notify_all()


def _did(seat: Seat, job: Job) -> Done:
    """The job's end as a value: the thread has nobody to raise to."""
    started = time.monotonic()
    try:
        answer, error = seat.run(job), None
    except Exception as raised:  # noqa: BLE001 - handed to the supervisor's thread, which raises what is not a failure
        answer, error = None, raised
    return Done(job, seat.name, answer, error, time.monotonic() - started)

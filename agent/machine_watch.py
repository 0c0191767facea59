"""The watch over the devices of a session: who else is on a GPU, throttling, errors, a lost device, and what follows.

A device in trouble is given time within bounds; a lost one stops the session resumably. Whether a crash is a
candidate's fault is doubted when the device had trouble meanwhile, or when several candidates in a row crashed: then
the original itself is judged first (agent.settling).
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from agent.errors import MachineError
from agent.gpu import GpuLostError, GpuSensor, Reading

WAIT_LIMIT_S = 600.0
POLL_S = 5.0
STOP_POLL_S = 0.1
BUSY_PERCENT = 10  # a display or a sleeping notebook takes less
CRASHES_IN_A_ROW = 3


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a device. One that is `fatal` is not waited for longer than the limit."""

    words: str
    fatal: bool


def trouble_of(reading: Reading, foreign: Sequence[int], *, idle: bool) -> Trouble | None:
    """What a reading says against measuring now; `idle` when none of our own work runs on the device."""
    if reading.throttle:
        return Trouble(f"GPU {reading.uuid} is throttled: {', '.join(reading.throttle)}", fatal=True)
    busy = reading.utilisation is not None and reading.utilisation >= BUSY_PERCENT
    if idle and foreign and busy:
        pids = ", ".join(map(str, foreign))
        return Trouble(
            f"another process uses GPU {reading.uuid} (pid {pids}, {reading.utilisation}% busy)", fatal=False
        )
    return None


def foreign_processes(reading: Reading, own: frozenset[int]) -> tuple[int, ...]:
    """Compute processes that are not ours; a pid that this namespace does not know may be ours, and is not counted."""
    known = [pid for pid in reading.processes or () if pid not in own and psutil.pid_exists(pid)]
    return tuple(known)


def own_processes() -> frozenset[int]:
    """This process and all below it."""
    return frozenset({os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))})


@dataclass
class Watch:
    """Looks at the devices between experiments; what happened goes to `record`, a line for the terminal to `say`."""

    sensors: Sequence[GpuSensor] = ()
    say: Callable[[str], None] = lambda _line: None
    record: Callable[[str], None] = lambda _what: None
    stop: Callable[[], bool] = lambda: False
    limit_s: float = WAIT_LIMIT_S
    poll_s: float = POLL_S
    crashes: int = 0  # of candidates in a row
    _doubts: list[str] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def look(self, *, idle: bool) -> None:
        """Wait until the devices are fit, within bounds. Raises GpuLostError or MachineError to stop resumably."""
        until, waited = time.monotonic() + self.limit_s, False
        while (trouble := self._trouble(idle=idle)) is not None and not self.stop():
            if time.monotonic() >= until:
                if trouble.fatal:
                    raise MachineError(f"{trouble.words}, for {self.limit_s:.0f} s")
                self._once(f"{trouble.words}: measuring all the same, each verdict says when it was too noisy")
                return
            if not waited:
                self.say(f"{trouble.words}: waiting, at most {self.limit_s:.0f} s")
                waited = True
            self._sleep()
        if waited and not self.stop():
            self.say("the devices are fit again")

    def doubt(self, *, crashed: bool) -> str | None:
        """Why the device may be to blame for what a candidate just did, or None; asked once for each verdict."""
        self.crashes = self.crashes + 1 if crashed else 0
        if not crashed:
            self._doubts.clear()
            return None
        try:
            for sensor in self.sensors:
                self._note(sensor.read())
        except GpuLostError as error:
            self.record(str(error))
            raise
        reasons, self._doubts = self._doubts, []
        if self.crashes >= CRASHES_IN_A_ROW:
            reasons.append(f"{self.crashes} candidates crashed in a row")
            self.crashes = 0
        return "; ".join(reasons) or None

    def close(self) -> None:
        """Let go of the driver."""
        for sensor in self.sensors:
            sensor.close()

    def _trouble(self, *, idle: bool) -> Trouble | None:
        own = own_processes() if self.sensors else frozenset()
        for sensor in self.sensors:
            try:
                reading = sensor.read()
            except GpuLostError as error:
                self.record(str(error))
                raise
            self._note(reading)
            trouble = trouble_of(reading, foreign_processes(reading, own), idle=idle)
            if trouble:
                self._once(trouble.words, say=False)
                return trouble
        return None

    def _note(self, reading: Reading) -> None:
        for xid in reading.xids or ():
            words = f"GPU {reading.uuid} reported Xid {xid}"
            self._doubts.append(words)
            self.record(words)
            self.say(words)

    def _once(self, words: str, *, say: bool = True) -> None:
        if words not in self._said:
            self._said.add(words)
            self.record(words)
            if say:
                self.say(words)

    def _sleep(self) -> None:
        until = time.monotonic() + self.poll_s
        while time.monotonic() < until and not self.stop():
            time.sleep(min(STOP_POLL_S, self.poll_s))

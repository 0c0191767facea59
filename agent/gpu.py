"""What a GPU says of itself, through NVML by its UUID; what this driver, MIG or a container does not tell is None.

Does not protect against a driver that hangs in a call.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from agent.errors import MachineError

HARMFUL = {
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "too hot (hardware)",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}  # a power cap under load is normal on a data-centre GPU, and idle clocks are too
LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_NOT_FOUND")
MIB = 1 << 20


class GpuLostError(MachineError):
    """The device does not answer any more; the session stops and can be resumed."""


@dataclass(frozen=True)
class Reading:
    """One look at a GPU; None is "not available here". `xids` are error numbers since the look before."""

    uuid: str
    name: str = ""
    sm_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilisation: int | None = None  # percent
    memory_free_mb: float | None = None
    memory_total_mb: float | None = None
    throttle: tuple[str, ...] | None = None  # harmful reasons only
    processes: tuple[int, ...] | None = None  # pids of compute processes
    xids: tuple[int, ...] | None = None


class GpuSensor(Protocol):
    """Where readings of one GPU come from."""

    def read(self) -> Reading:
        """Look now. Raises GpuLostError when the device is gone."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...


class NvmlSensor:
    """The real one; opened once, so that a session's looks cost no more than a few calls."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._uuid = uuid
        self._events: Any = None
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise GpuLostError(f"GPU {uuid} does not answer ({error})") from error
        with suppress(pynvml.NVMLError):  # containers and MIG often do not offer events
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def read(self) -> Reading:
        """All there is to know now."""
        nvml, handle = self._nvml, self._handle
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        running = self._ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return Reading(
            self._uuid,
            str(self._ask(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            None if power is None else power / 1000,
            None if rates is None else int(rates.gpu),
            None if memory is None else memory.free / MIB,
            None if memory is None else memory.total / MIB,
            None if reasons is None else self._harmful(int(reasons)),
            None if running is None else tuple(int(one.pid) for one in running),
            self._xids(),
        )

    def _harmful(self, bits: int) -> tuple[str, ...]:
        return tuple(words for name, words in HARMFUL.items() if bits & int(getattr(self._nvml, name, 0)))

    def _xids(self) -> tuple[int, ...] | None:
        if self._events is None:
            return None
        found: list[int] = []
        with suppress(self._nvml.NVMLError):  # a time-out is how the queue says that it is empty
            while len(found) < 100:
                found.append(int(self._nvml.nvmlEventSetWait(self._events, 0).eventData))
        return tuple(found)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """A figure, None where this GPU does not have it; raises GpuLostError when it is gone."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            if error.value in {getattr(self._nvml, name, None) for name in LOST}:
                raise GpuLostError(f"GPU {self._uuid} is lost ({error})") from error
            return None

    def close(self) -> None:
        """Let go."""
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

"""The device we measure on: its name, versions, synchronisation and measured peaks. All that is device-specific.

Peaks are measured once per device and torch version and cached under the user's cache folder. On a shared machine they
are what was reachable then, not what the data sheet says.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.vendor import driver_version, vendor

COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 1 << 30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
CPU_HALF_MATMUL = 256  # eager half-precision products of 1024 take seconds on a CPU
PEAK_DTYPES = ("float32", "float16", "bfloat16")


def device_name(device: str) -> str:
    """The device as people call it, such as "NVIDIA H200" or the CPU's model name."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({torch.get_num_threads()} threads)"


def synchronize(device: str) -> None:
    """Wait for all the work given to the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def versions(device: str) -> dict[str, str]:
    """What a measurement depends on: python, torch, triton, device, driver."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "device": device_name(device)}
    try:
        import triton

        found["triton"] = str(triton.__version__)
    except ImportError:
        found["triton"] = "absent"
    if device.startswith("cuda"):
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["driver"] = driver_version()
    return found


@dataclass(frozen=True)
class Clocks:
    """What a GPU runs at now; `slowed` names why it is slower than it could be, for its own protection."""

    sm_mhz: int
    memory_mhz: int
    celsius: int
    slowed: tuple[str, ...]
    capped: bool  # by its power limit, as under any heavy load: said, not acted on

    def said(self) -> str:
        """In a few words, for a verdict."""
        limits = (*self.slowed, *(("power limit",) if self.capped else ()))
        return f"{self.sm_mhz}/{self.memory_mhz} MHz, {self.celsius} °C" + (f", {', '.join(limits)}" if limits else "")


PROTECTIVE = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
POWER_CAP = 0x4
"""Bits of NVML's clock event reasons."""


def clocks(device: str) -> Clocks | None:
    """The clocks of the device in use; None on a CPU and where NVML is absent or does not know."""
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return Clocks(
            int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            tuple(name for bit, name in PROTECTIVE.items() if reasons & bit),
            bool(reasons & POWER_CAP),
        )
    except (pynvml.NVMLError, AttributeError):
        return None


def unslowed(device: str, patience_s: float) -> Clocks | None:
    """The clocks once the GPU no longer protects itself, waiting at most `patience_s`: then as they are."""
    deadline = time.monotonic() + patience_s
    while (now := clocks(device)) is not None and now.slowed and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


def describe(body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The device, its versions and, unless {"peaks": False}, its measured peaks."""
    options = body or {}
    device = str(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    report: dict[str, Any] = {"device": device, "name": device_name(device), "versions": versions(device)}
    report["cuda_available"] = torch.cuda.is_available()
    whose = vendor(device)
    report |= {"vendor": whose.name, "architecture": whose.architecture, "skipped_backends": dict(whose.skipped)}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(0)
        report["memory_bytes"] = int(properties.total_memory)
        report["capability"] = f"{properties.major}.{properties.minor}"
        report["multiprocessors"] = int(properties.multi_processor_count)
    if options.get("peaks", True):
        report["peaks"] = peaks(device)
    return report


def peaks(device: str) -> dict[str, float]:
    """Measured peaks: "copy_bytes_per_s", "matmul_<dtype>_flops", "launch_us": the best seen on this device so far.

    A GPU's are taken from the cache; a CPU is shared, so it is measured again and the better figure is kept.
    """
    path = _cache_path(device)
    try:
        cached = {str(key): float(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        cached = {}
    if cached and device.startswith("cuda"):
        return cached
    found = _better(cached, measure_peaks(device))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(found), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        return found  # a read-only home costs a measurement next time, no more
    return found


def _better(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """Rates: the higher one; the launch time: the lower one."""
    return {key: (min if key.endswith("_us") else max)(old.get(key, value), value) for key, value in new.items()}


def _cache_path(device: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    identity = f"{device_name(device)} {torch.__version__} {torch.get_num_threads() if device == 'cpu' else ''}"
    return root / "overnight" / "peaks" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def measure_peaks(device: str) -> dict[str, float]:
    """Measure now (about one second): the best of several runs each, since a peak is what can be reached."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    found = {"copy_bytes_per_s": _copy_rate(kind), "launch_us": _launch_us(kind)}
    for name in PEAK_DTYPES:
        found[f"matmul_{name}_flops"] = _matmul_rate(kind, getattr(torch, name))
    return found


def _copy_rate(kind: str) -> float:
    """Bytes read plus bytes written per second by a large copy."""
    count = COPY_BYTES[kind] // 4
    source = torch.ones(count, device=kind)
    target = torch.empty_like(source)
    return 2 * 4 * count / _best_seconds(lambda: target.copy_(source), kind)


def _matmul_rate(kind: str, dtype: torch.dtype) -> float:
    size = MATMUL_SIZE[kind]
    if kind == "cpu" and dtype is not torch.float32:
        size = CPU_HALF_MATMUL
    one = torch.randn(size, size, device=kind).to(dtype)
    out = torch.empty_like(one)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(one, one, out=out), kind)


def _launch_us(kind: str) -> float:
    """What a kernel on nothing costs inside the deployed mode: graph replay per node on a GPU, a C++ call on a CPU."""
    tiny = torch.ones(16, device=kind)
    if kind == "cpu":
        samples = [_seconds(lambda: torch.add(tiny, 1.0, out=tiny), kind) for _ in range(200)]
        return 1e6 * median(samples)
    count = 256
    graph = torch.cuda.CUDAGraph()
    torch.add(tiny, 1.0, out=tiny)
    with torch.cuda.graph(graph):
        for _ in range(count):
            torch.add(tiny, 1.0, out=tiny)
    return 1e6 * _best_seconds(graph.replay, kind) / count


def _best_seconds(work: Callable[[], Any], kind: str) -> float:
    for _ in range(3):
        work()
    return min(_seconds(work, kind) for _ in range(10))


def _seconds(work: Callable[[], Any], kind: str) -> float:
    synchronize(kind)
    start = time.perf_counter()
    work()
    synchronize(kind)
    return time.perf_counter() - start

"""The machine as far as the agent needs it without torch: is there a GPU that this torch can use, and versions."""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def default_device() -> str:
    """`cuda` (torch's name for AMD's devices too) when torch was built for it and a device is there, else `cpu`."""
    return "cuda" if (_torch_has("cuda") and gpu_names()) or (is_rocm() and Path("/dev/kfd").exists()) else "cpu"


def is_rocm() -> bool:
    """Whether this torch is AMD's build: CUDA C++ kernels cannot be built for its devices."""
    return _torch_has("hip")


@dataclass(frozen=True)
class Gpu:
    """One visible GPU of this host: its number among the visible ones, its UUID, its name."""

    index: int
    uuid: str
    name: str


def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs of this host that are not hidden; empty without driver or NVML."""
    return tuple(gpu.name for gpu in gpus())


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of this host that are not hidden, in CUDA's order by bus; empty without driver or NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [(str(pynvml.nvmlDeviceGetUUID(one)), str(pynvml.nvmlDeviceGetName(one))) for one in handles]
    finally:
        pynvml.nvmlShutdown()
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(found: Sequence[tuple[str, str]], shown: str | None) -> tuple[Gpu, ...]:
    """Of all (UUID, name) those that CUDA_VISIBLE_DEVICES shows, in its order: it names numbers or starts of UUIDs.

    As in CUDA, the first entry that names no device ends the list.
    """
    if shown is None:
        return tuple(Gpu(place, uuid, name) for place, (uuid, name) in enumerate(found))
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in shown.split(",")):
        fits = [one for place, one in enumerate(found) if entry and (entry == str(place) or one[0].startswith(entry))]
        if len(fits) != 1:
            break
        chosen.append(Gpu(len(chosen), *fits[0]))
    return tuple(chosen)


def pin(gpu: Gpu) -> tuple[tuple[str, str], ...]:
    """The environment in which a process sees this GPU alone; UUIDs do not move when a device is lost."""
    return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", gpu.uuid))


def driver_version() -> str:
    """The NVIDIA driver's version, or "none"."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "none"
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def cpu_flags() -> frozenset[str]:
    """What the processor can do, by the names of /proc/cpuinfo ("avx2", "avx512f", ...)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_version(package: str) -> str:
    """The installed version, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _torch_has(kind: str) -> bool:
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "lib" / f"libtorch_{kind}.so").exists() for folder in folders or ())

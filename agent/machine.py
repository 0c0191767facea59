"""The machine as far as the agent needs it without torch: is there a GPU that this torch can use, and versions."""

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path


def default_device() -> str:
    """`cuda` when torch was built for it and a device is visible, else `cpu`."""
    return "cuda" if _torch_has_cuda() and gpu_names() else "cpu"


def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs of this host that are not hidden; empty without driver or NVML."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


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


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders or ())

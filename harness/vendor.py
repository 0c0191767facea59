"""Whose device it is: NVIDIA's (CUDA), AMD's (ROCm) or the processor, and which kernel backends it can run.

ROCm's torch calls its devices "cuda" too; torch.version.hip tells. Unknown devices need no table of names: what they
can do is measured (harness/device.py). ROCm kernels are compiled in the tests; nothing here was run on such a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Vendor:
    """`architecture` is gfx942, sm_90 and the like; `skipped` says why a backend's files cannot run."""

    name: str  # "cuda", "rocm" or "cpu"
    architecture: str
    backends: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def vendor_of(device: str, *, hip: str | None, gcn: str = "", capability: tuple[int, int] = (0, 0)) -> Vendor:
    """From what torch says: its version of HIP, the device's gcnArchName, its compute capability."""
    if not device.startswith("cuda"):
        return Vendor("cpu", "", ("cpp", "library"), {"triton": "needs a GPU", "cuda": "needs an NVIDIA GPU"})
    if hip is not None:
        name = gcn.partition(":")[0]  # without features such as sramecc+
        reason = f"CUDA C++ is built by nvcc for NVIDIA devices; this is {name or 'an AMD device'}"
        return Vendor("rocm", name, ("triton", "library"), {"cuda": reason, "cpp": "runs on the processor"})
    architecture = f"sm_{capability[0]}{capability[1]}"
    return Vendor("cuda", architecture, ("triton", "cuda", "library"), {"cpp": "runs on the processor"})


def vendor(device: str) -> Vendor:
    """Of a device of this host."""
    if not device.startswith("cuda"):
        return vendor_of(device, hip=None)
    properties = torch.cuda.get_device_properties(torch.device(device).index or 0)
    gcn = str(getattr(properties, "gcnArchName", ""))
    return vendor_of(device, hip=torch.version.hip, gcn=gcn, capability=(properties.major, properties.minor))


def driver_version() -> str:
    """The driver's version through NVML, or AMD's library on ROCm; "n/a (reason)" where neither answers."""
    return _amd_driver() if torch.version.hip is not None else _nvidia_driver()


def _nvidia_driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # noqa: BLE001 - NVML fails in many ways where it is absent; the version is then n/a
        return f"n/a ({type(error).__name__})"


def _amd_driver() -> str:
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        handle = amdsmi.amdsmi_get_processor_handles()[0]
        return str(amdsmi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    except Exception as error:  # noqa: BLE001 - as above
        return f"n/a ({type(error).__name__})"

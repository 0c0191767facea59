"""Whether a model is of a kind that can be captured and judged at all, and whether it fits into memory.

What cannot be is refused by name before anything of it runs: weights that are not there, weights in another format,
models spread over devices or processes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import InputError

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
HOST_RESERVE = 0.95  # of what is available; the rest is for the graphs' own values


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, where the user has compiled it already."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def check_model(model: nn.Module, name: str) -> None:
    """Raise InputError for a model that can be neither captured nor judged, by what it is."""
    for path, module in model.named_modules():
        reason = _module_problem(module)
        if reason:
            raise InputError(f"{name}{f'.{path}' if path else ''} {reason}")
    spread: Any = getattr(model, "hf_device_map", None) or {}
    if len(set(map(str, spread.values()))) > 1:
        raise InputError(f"{name} is spread over several devices (device_map); load it on one")
    tensors = list(_tensors(model))
    for key, tensor in tensors:
        reason = _tensor_problem(tensor)
        if reason:
            raise InputError(f"{name}: {key} {reason}")
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    if len(devices) > 1:
        raise InputError(f"{name} is spread over several devices ({', '.join(devices)}); load it on one")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _module_problem(module: nn.Module) -> str:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which TorchDynamo cannot trace; give the Python class"
    if kind.__name__ in WRAPPERS:
        return f"is wrapped in {kind.__name__}; give the module inside (.module)"
    if kind.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
        return f"is a quantised module ({kind.__name__}); give the model it was made from"
    if kind.__module__.startswith(("bitsandbytes.", "awq.", "auto_gptq.", "gptqmodel.")):
        return f"is quantised by {kind.__module__.split('.')[0]} ({kind.__name__}); give the model it was made from"
    return ""


def _tensor_problem(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "has no shape yet (a lazy module); run the model once in its factory"
    if kind.__name__ == "DTensor":
        return "is distributed over processes (DTensor); load the model in one"
    if kind not in PLAIN:
        return f"is a {kind.__name__} ({kind.__module__.split('.')[0]}), not a plain tensor; give unquantised weights"
    if tensor.is_meta:
        return "is on the meta device: it has a shape and no values; load its weights"
    if tensor.is_quantized:
        return "is quantised; give the model it was made from"
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}, not a dense tensor; call to_dense() on it"
    return ""


def check_memory(model: nn.Module, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Raise InputError when the model's tensors alone do not fit on the device."""
    tensors = {tensor.data_ptr(): tensor for _, tensor in _tensors(model)}.values()
    needed = sum(
        tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size()) for tensor in tensors
    )
    if device.type == "cuda":
        there = float(torch.cuda.mem_get_info(device)[0])
    else:
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        there = available_bytes() + held  # it is in memory already; casting makes a second copy piece by piece
    if needed > HOST_RESERVE * there:
        raise InputError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, and "
            f"{there / 2**30:.1f} GiB are free on {device.type}; choose a smaller model or --dtype"
        )


def check_files_fit(files: Iterator[Path] | list[Path], name: str) -> None:
    """Raise InputError when files of weights are larger than the memory they would be read into."""
    needed = sum(path.stat().st_size for path in files)
    if needed > HOST_RESERVE * available_bytes():
        raise InputError(
            f"{name} holds {needed / 2**30:.1f} GiB of weights, and {available_bytes() / 2**30:.1f} GiB of memory are "
            "free; choose a smaller model"
        )


def available_bytes() -> float:
    """Memory of this machine that is free or can be made so; infinite where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float("inf")


def reads_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of torch's ways."""
    text: Any = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text

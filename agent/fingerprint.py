"""What a session was measured on: the model's files, and the machine. Compared on every resume."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent import machine
from harness.records import ModelSpec

MODEL_KEYS = ("source", "weights", "inputs", "options")
BLOCK = 1 << 20


def fingerprint(spec: ModelSpec, device: str, root: Path) -> dict[str, str]:
    """Hashes of the model's files and versions of what runs them."""
    return {
        "source": _hash(_source_files(spec.reference, root)),
        "weights": _hash([Path(spec.weights)] if spec.weights else []),
        "inputs": _hash([Path(spec.inputs.rpartition(":")[0])] if spec.inputs else []),
        "options": repr((spec.reference, dict(spec.model_args), spec.input_shapes, spec.dtype, spec.inputs)),
        "device": " + ".join(machine.gpu_names()) if device == "cuda" else machine.cpu_name(),
        "driver": machine.driver_version() if device == "cuda" else "none",
        "torch": machine.package_version("torch"),
        "triton": machine.package_version("triton"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The names of what changed: of the model, and of the machine."""
    changed = [name for name in after if before.get(name) != after[name]]
    return [name for name in changed if name in MODEL_KEYS], [name for name in changed if name not in MODEL_KEYS]


def _source_files(reference: str, root: Path) -> list[Path]:
    path = Path(reference if Path(reference).exists() else reference.rpartition(":")[0])
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path] if path.is_file() else _module_files(str(path), root)


def _module_files(module: str, root: Path) -> list[Path]:
    """The file of `package.module`, found without importing it."""
    inside = Path(*module.split("."))
    for folder in (Path.cwd(), root, *map(Path, sys.path)):
        for file in (folder / inside.with_suffix(".py"), folder / inside / "__init__.py"):
            if file.is_file():
                return [file]
    return []


def _hash(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                total.update(block)
    return total.hexdigest()

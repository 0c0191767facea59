"""MODEL and its options, from the command line to a record with absolute paths."""

import re
from collections.abc import Sequence
from pathlib import Path

from agent.errors import InputError
from harness.records import SHORT_DTYPES, ModelSpec

DTYPES = ("float32", "float16", "bfloat16")
ADAPTER = "adapter_config.json"  # of a LoRA adapter: loading says what to do with it
TRUSTED = ("code", "pickle")


def model_spec(
    model: str,
    *,
    weights: str | None = None,
    model_args: Sequence[str] = (),
    inputs: str | None = None,
    input_shapes: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    trust: Sequence[str] = (),
) -> ModelSpec:
    """Check what can be checked without importing anything of the user's; raises InputError."""
    return ModelSpec(
        reference=_reference(model),
        weights=None if weights is None else _file(weights, "--weights"),
        model_args=dict(_pair(item) for item in model_args),
        inputs=None if inputs is None else _function(inputs),
        input_shapes=tuple(_shape(item) for item in input_shapes),
        device=checked_device(device),
        dtype=checked_dtype(dtype),
        trust=_trusted(trust),
    )


def session_name(spec: ModelSpec) -> str:
    """The default session name: the model's class, or its folder's name, in lower case."""
    path, _, name = spec.reference.rpartition(":")
    stem = name if path else Path(spec.reference).name.removesuffix(".py").removesuffix(".gguf")
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-") or "model"


def checked_device(device: str | None) -> str | None:
    """None means cuda where there is one."""
    if device not in {None, "cpu", "cuda"}:
        raise InputError(f"--device {device} is not known: use cpu or cuda.")
    return device


def checked_dtype(dtype: str | None) -> str | None:
    """The long name of a dtype, None when not given."""
    long = None if dtype is None else SHORT_DTYPES.get(dtype, dtype)
    if long is not None and long not in DTYPES:
        raise InputError(f"--dtype {dtype} is not known: use float32, float16 or bfloat16 (or fp32, fp16, bf16).")
    return long


def _trusted(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in TRUSTED]
    if unknown:
        raise InputError(f"--trust {unknown[0]} is not known: use code (a checkpoint's own Python) or pickle.")
    return tuple(names)


def _reference(model: str) -> str:
    path, _, name = model.rpartition(":")
    if path.endswith(".py"):
        return f"{_file(path, 'MODEL')}:{name}"
    if path and re.fullmatch(r"[\w.]+", path) and not Path(model).exists():
        return model
    if not model or not Path(model).exists():
        raise InputError(
            f"MODEL {model} was not found: give FILE.py:CLASS, package.module:CLASS or a checkpoint folder."
        )
    if Path(model).is_file() and not model.endswith((".py", ".gguf")):
        raise InputError(
            f"MODEL {model} is neither Python nor a checkpoint folder: give FILE.py:CLASS, and a file of weights with"
            " --weights."
        )
    if Path(model).is_dir() and not any((Path(model) / name).is_file() for name in ("config.json", ADAPTER)):
        raise InputError(
            f"MODEL {model} is a folder without config.json: give a Hugging Face checkpoint folder or FILE.py:CLASS."
        )
    return str(Path(model).resolve())


def _file(path: str, what: str) -> str:
    if not Path(path).is_file():
        raise InputError(f"{what}: there is no file {path}.")
    return str(Path(path).resolve())


def _function(inputs: str) -> str:
    path, _, name = inputs.rpartition(":")
    if not path or not name.isidentifier():
        raise InputError(f"--inputs {inputs} must read FILE.py:FUNCTION.")
    return f"{_file(path, '--inputs')}:{name}"


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"--model-args {item} must read NAME=VALUE.")
    return name, value


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise InputError(f"--input-shape {text} must be sizes separated by commas, like 1,512.")
    shape = tuple(int(size) for size in text.split(","))
    if 0 in shape:
        raise InputError(f"--input-shape {text} holds no element: every size must be at least 1.")
    return shape


def sizes(text: str) -> dict[str, int]:
    """`M=512,N=1024` as sizes by symbol."""
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(name.strip().isidentifier() and size.strip().isdigit() for name, _, size in pairs):
        raise InputError(f"--shape {text} must read like M=512,N=1024.")
    return {name.strip(): int(size) for name, _, size in pairs}

"""Checkpoints on disk: Hugging Face folders, .gguf files, and files of weights for a class.

Nothing is taken on trust: files are looked at before they are loaded, and every tensor must be there, fit and be used.
Code in a checkpoint and pickles with objects run only when the user says so (`ModelSpec.trust`). Never touches the
network.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import InputError
from harness.records import ModelSpec

CODE, PICKLE = "code", "pickle"
INDEX = ".index.json"
NAMED = 3  # keys that a message names


def read_folder(place: Path, spec: ModelSpec, settings: Mapping[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """The model of a folder with config.json and weights, or of a .gguf file, in `dtype` or its own."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{place} is a Hugging Face checkpoint; install overnight[hf] to load it") from error
    if place.is_dir():
        _check_folder(place)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": CODE in spec.trust}
    if not place.is_dir():
        _check_gguf(place)
        options["gguf_file"] = place.name
    folder = place if place.is_dir() else place.parent
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        _refuse_special(place, config, spec)
        for key, value in settings.items():
            if not hasattr(config, key):
                raise InputError(f"{place}: its configuration has no {key!r}; see its config.json")
            setattr(config, key, value)
        if hasattr(config, "use_cache") and "use_cache" not in settings:
            config.use_cache = False
        loader = _loader(transformers, config, place, spec)
        options |= {"config": config, "dtype": dtype or _own_dtype(config)}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are in the report
        model, report = loader.from_pretrained(folder, **options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the library, and code in a checkpoint, may raise anything
        raise InputError(f"{place} cannot be loaded by transformers: {_first_line(error)}") from error
    _check_report(place, model, report)
    loaded: nn.Module = model
    return loaded


def _own_dtype(config: Any) -> torch.dtype:
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _check_folder(folder: Path) -> None:
    """Say what is missing or cut short before gigabytes are read."""
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        remedy = (
            "it holds a LoRA adapter alone: load it with peft, call merge_and_unload() and save_pretrained()"
            if adapter
            else "give a Hugging Face checkpoint or FILE.py:Class"
        )
        raise InputError(f"{folder} is a folder without config.json; {remedy}")
    _read_json(folder / "config.json")
    for index in sorted(folder.glob(f"*{INDEX}")):
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{folder}: {index.name} names {len(shards)} files of weights, of which {_some(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; fetch the checkpoint again"
            )
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")]
    if not weights:
        raise InputError(f"{folder} holds no weights (.safetensors or .bin); fetch the checkpoint again")
    for path in folder.glob("*.safetensors"):
        check_safetensors(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON ({_first_line(error)}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object; fetch the checkpoint again")
    return value


def check_safetensors(path: Path) -> None:
    """Raise InputError when the file is shorter than its own header says, or is no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(length) if 0 < length <= size else b""
    try:
        entries = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path} is no safetensors file, or cut short within its header; fetch it again") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise InputError(f"{path} is cut short: {size} bytes, its header says {expected}; fetch it again")


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{path} is no GGUF file; give one, or a checkpoint folder")
    try:
        import gguf  # type: ignore[import-not-found,unused-ignore]  # noqa: F401 - transformers needs it
    except ImportError as error:
        raise InputError(f"{path} needs the package gguf; install overnight[hf]") from error


def _refuse_special(place: Path, config: Any, spec: ModelSpec) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise InputError(
            f"{place} is quantised ({method}): its packed weights and operators cannot be judged in float64; give the "
            "checkpoint it was made from"
        )
    if getattr(config, "auto_map", None) and CODE not in spec.trust:
        raise InputError(f"{place} brings Python code of its own; read it, then allow it with --trust code")


def _loader(transformers: Any, config: Any, place: Path, spec: ModelSpec) -> Any:
    architectures = getattr(config, "architectures", None) or []
    named = getattr(transformers, architectures[0], None) if architectures else None
    if named is not None:
        return named
    own = getattr(config, "auto_map", None) or {}
    if own and CODE in spec.trust:
        return getattr(transformers, next((name for name in own if name.startswith("AutoModel")), "AutoModel"))
    if architectures:
        raise InputError(f"{place}: this transformers knows no {architectures[0]}; install a version that does")
    return transformers.AutoModelForCausalLM if place.suffix == ".gguf" else transformers.AutoModel


def _check_report(place: Path, model: nn.Module, report: Mapping[str, Any]) -> None:
    """Every tensor of the model came from the checkpoint, and every tensor of the checkpoint went into the model."""
    missing, unexpected = sorted(report.get("missing_keys", ())), sorted(report.get("unexpected_keys", ()))
    wrong = sorted(str(each[0] if isinstance(each, tuple) else each) for each in report.get("mismatched_keys", ()))
    said = differences(missing, unexpected, wrong)
    if said:
        raise InputError(f"{place} does not fit {type(model).__name__}: {said}; correct architectures in config.json")
    if report.get("error_msgs"):
        raise InputError(f"{place} cannot be loaded into {type(model).__name__}: {str(report['error_msgs'][0])[:200]}")


def load_weights(model: nn.Module, path: Path, spec: ModelSpec) -> None:
    """Load --weights into a model; every key must be there, fit and be used. Tied weights may be given once."""
    if not path.is_file():
        raise InputError(f"--weights {path} does not exist")
    state = _read_weights(path, trusted=PICKLE in spec.trust)
    expected = model.state_dict()
    present = {expected[key].data_ptr() for key in state if key in expected and expected[key].numel()}
    missing = [key for key in expected if key not in state and expected[key].data_ptr() not in present]
    unexpected = [key for key in state if key not in expected]
    wrong = [key for key in expected if key in state and state[key].shape != expected[key].shape]
    if missing or unexpected or wrong:
        raise InputError(
            f"--weights {path} does not fit {type(model).__name__}: {differences(missing, unexpected, wrong)}"
        )
    model.load_state_dict(state, strict=False)


def differences(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> str:
    """What does not fit, in words; "" when all does."""
    parts = [
        f"{len(keys)} {what} ({_some(keys)})"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if keys
    ]
    return "; ".join(parts)


def _some(keys: Sequence[str]) -> str:
    return ", ".join(list(keys)[:NAMED]) + (", ..." if len(keys) > NAMED else "")


def _read_weights(path: Path, *, trusted: bool) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        check_safetensors(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(str(path)))
        state = _unpickled(path, trusted=trusted)
    except ImportError as error:
        raise InputError(f"--weights {path} needs safetensors; install overnight[hf]") from error
    except Exception as error:
        raise InputError(
            f"--weights {path} cannot be read as plain tensors ({type(error).__name__}); give what "
            "torch.save(model.state_dict(), FILE) or safetensors wrote, or allow a pickle you made with --trust pickle"
        ) from error
    if isinstance(state, nn.Module):
        return dict(state.state_dict())
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"--weights {path} holds no state dict; save model.state_dict()")
    return state


def _unpickled(path: Path, *, trusted: bool) -> Any:
    """Plain tensors first; objects, whose pickle may run any code, only where the user trusts the file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        if not trusted:
            raise
        return torch.load(path, map_location="cpu", weights_only=False)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

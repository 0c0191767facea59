"""Loads the user's model and its inputs from what MODEL and its options name (contracts: MODEL).

Runs the user's Python: their module is loaded under a private name with its folder last on the path, so that their
files never shadow ours or the standard library. Does not protect against what that code does. Every input that cannot
be used raises InputError with the remedy.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from harness.checkpoints import load_weights, read_folder
from harness.derived_inputs import derive_inputs
from harness.errors import InputError
from harness.example_inputs import InputSet, given_inputs, shaped_inputs
from harness.fitness import check_files_fit, check_memory, check_model, reads_out_of_memory, unwrapped
from harness.index_check import CheckedIndices
from harness.outputs import copied, restored
from harness.records import SHORT_DTYPES, ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
PRIVATE_MODULE = "overnight_user_model"


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, and inputs to run it on.

    `args` and `kwargs` are those of the first input set; `input_sets` holds all of them. `fingerprint` identifies
    source, weights and inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    device: str  # "cpu" or "cuda"
    dtype: torch.dtype
    fingerprint: dict[str, str] = field(default_factory=dict)
    input_sets: tuple[InputSet, ...] = ()
    given: bool = False  # whether the inputs' values are the user's own

    def __call__(self) -> Any:
        """Run the model on a copy of its example, without gradients; the buffers stay as they are."""
        args, kwargs = copied((self.args, self.kwargs))
        with torch.no_grad(), restored(self.model):
            return self.model(*args, **kwargs)


@dataclass(frozen=True)
class _Found:
    """What the reference named: a model, not yet cast, and where its inputs may come from."""

    model: nn.Module
    name: str
    source: str
    module: ModuleType | None
    dtype: torch.dtype | None = None


def load_model(spec: ModelSpec) -> LoadedModel:
    """Load, place, cast and try the model once. Raises InputError naming what is wrong and what to do."""
    device = _device(spec.device)
    found = _find(spec)
    found = replace(found, model=unwrapped(found.model))
    dtype = _dtype(spec.dtype) or found.dtype or torch.float32
    if spec.weights is not None:
        load_weights(found.model, Path(spec.weights), spec)
    check_model(found.model, found.name)
    check_memory(found.model, device, dtype, found.name)
    model = _placed(found.model, device, dtype)
    sets = _inputs(spec, found, model, device, dtype)
    first = sets[0]
    loaded = LoadedModel(
        model,
        first.args,
        dict(first.kwargs),
        found.name,
        device.type,
        dtype,
        _fingerprint(spec, found, model),
        tuple(sets),
        given=spec.inputs is not None,
    )
    _try(loaded)
    return loaded


def _device(asked: str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device {asked} is not supported; use cpu or cuda")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, but torch sees no CUDA device here; use --device cpu")
    return torch.device(asked)


def _dtype(asked: str | None) -> torch.dtype | None:
    if asked is None:
        return None
    name = SHORT_DTYPES.get(asked, asked)
    if name not in DTYPES:
        raise InputError(f"--dtype {asked} is not known; use float32, float16 or bfloat16")
    return DTYPES[name]


def _find(spec: ModelSpec) -> _Found:
    reference = spec.reference
    path, _, name = reference.partition(":")
    if Path(reference).is_dir():
        return _hugging_face(Path(reference), spec)
    if reference.endswith(".gguf"):
        return _hugging_face(Path(reference), spec)
    if path.endswith(".py"):
        module = load_module(Path(path))
        if name:
            return _Found(_built(module, name, spec.model_args, path), name, path, module)
        return _kernelbench(module, path)
    if not name:
        raise InputError(
            f"MODEL {reference!r} is neither a file nor a folder that exists; give FILE.py:Class, "
            "package.module:Class, a checkpoint folder or a KernelBench file"
        )
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise InputError(
            f"MODEL {reference!r}: cannot import {path}: {error}; is it installed in this Python?"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(f"MODEL {reference!r}: importing {path} raised {first_line(error)}; mend it first") from error
    return _Found(_built(module, name, spec.model_args, path), name, getattr(module, "__file__", None) or path, module)


def load_module(path: Path) -> ModuleType:
    """The user's Python file as a module under a private name; raises InputError when it cannot be imported."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the path of a Python file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"{PRIVATE_MODULE}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {first_line(error)}; mend the file first") from error
    return module


def first_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def classes_in(module: ModuleType) -> list[str]:
    """The nn.Module classes that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]


def _built(module: ModuleType, name: str, model_args: Mapping[str, str], place: str) -> nn.Module:
    factory = getattr(module, name, None)
    there = ", ".join(classes_in(module)) or "no nn.Module class"
    if factory is None:
        raise InputError(f"{place} has no {name}; it defines {there}")
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise InputError(f"{place}:{name} is a {type(factory).__name__}, not an nn.Module class or factory")
    arguments = {key: _yaml(value) for key, value in model_args.items()}
    _check_arguments(factory, arguments, f"{place}:{name}")
    torch.manual_seed(0)
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{place}:{name} cannot be built with {arguments or 'no arguments'}: {first_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{place}:{name} returned a {type(model).__name__}, not an nn.Module")
    return model


def _check_arguments(factory: Any, arguments: Mapping[str, Any], place: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [key for key in arguments if key not in signature.parameters and not open_ended]
    if unknown:
        known = ", ".join(signature.parameters) or "none"
        raise InputError(f"{place} takes no argument {unknown[0]!r}; it takes: {known}")
    missing = [
        name
        for name, p in signature.parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in arguments
    ]
    if missing:
        raise InputError(
            f"{place} needs {', '.join(missing)}; give them with --model-args, such as --model-args {missing[0]}=..."
        )


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--model-args value {text!r} is not YAML: {first_line(error)}") from error


def _kernelbench(module: ModuleType, path: str) -> _Found:
    functions = [getattr(module, name, None) for name in ("get_inputs", "get_init_inputs")]
    if not hasattr(module, "Model") or not all(callable(function) for function in functions):
        there = classes_in(module)
        listed = ", ".join(f"{path}:{name}" for name in there)
        raise InputError(
            f"{path} names no class and is no KernelBench problem (Model, get_inputs, get_init_inputs); "
            + (f"name one: {listed}" if there else "it defines no nn.Module class: give a file that does")
        )
    torch.manual_seed(0)
    try:
        arguments = module.get_init_inputs()
        if isinstance(arguments, Mapping):
            model = module.Model(**arguments)
        elif len(arguments) == 2 and isinstance(arguments[0], list) and isinstance(arguments[1], Mapping):
            model = module.Model(*arguments[0], **arguments[1])
        else:
            model = module.Model(*arguments)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{path}: Model(*get_init_inputs()) fails: {first_line(error)}; mend the problem file"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{path}: Model(...) is a {type(model).__name__}, not an nn.Module; derive it from nn.Module")
    return _Found(model, "Model", path, module)


def _hugging_face(place: Path, spec: ModelSpec) -> _Found:
    """A folder with config.json and weights, or a .gguf file."""
    if place.is_dir():
        check_files_fit([*place.glob("*.safetensors"), *place.glob("*.bin")], str(place))
    settings = {key: _yaml(value) for key, value in spec.model_args.items()}
    model = read_folder(place, spec, settings, _dtype(spec.dtype))
    floating = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    return _Found(model, type(model).__name__, str(place), None, floating)


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """On the device, floating tensors cast (integers, booleans and complex tables keep their type), in eval mode."""
    model = model.to(device)
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # noqa: SLF001 - `to` would cast complex too
    return model.eval().requires_grad_(requires_grad=False)


def _inputs(
    spec: ModelSpec, found: _Found, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> Sequence[InputSet]:
    if spec.inputs is not None:
        path, _, name = spec.inputs.partition(":")
        if not name:
            raise InputError(f"--inputs {spec.inputs} names no function; give FILE.py:FUNCTION")
        function = getattr(load_module(Path(path)), name, None)
        if not callable(function):
            raise InputError(f"--inputs: {path} has no function {name}")
        return given_inputs(function, f"{path}:{name}", device, dtype)
    if spec.input_shapes:
        return [shaped_inputs(model, spec.input_shapes, device, dtype)]
    own: Any = getattr(model, "example_inputs", None)
    if callable(own):
        return given_inputs(own, f"{found.name}.example_inputs", device, dtype)
    if found.module is not None and callable(getattr(found.module, "get_inputs", None)):
        return given_inputs(found.module.get_inputs, f"{found.source}:get_inputs", device, dtype)
    return [derive_inputs(model, device, dtype)]


def _try(loaded: LoadedModel) -> None:
    """Run every input set once, so that a model that cannot run is said here and nowhere later."""
    for one in loaded.input_sets:
        given = describe_inputs(one.args, one.kwargs)
        try:
            with CheckedIndices():
                replace(loaded, args=one.args, kwargs=dict(one.kwargs))()
        except InputError as error:
            raise InputError(f"{loaded.name} on {given}: {error}; give ids within it with --inputs") from error
        except (Exception, SystemExit) as error:
            if reads_out_of_memory(error):
                raise InputError(
                    f"{loaded.name} on {given} does not fit into the memory of this {loaded.device} device; "
                    "give smaller inputs with --input-shape or --inputs"
                ) from error
            raise InputError(
                f"{loaded.name}.forward raised {first_line(error)} on {given}; "
                "give inputs that fit with --inputs FILE.py:FUNCTION or --input-shape"
            ) from error


def describe_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Inputs in a few words, such as "int64 [1, 128]"."""
    parts = [_describe(value) for value in args] + [f"{key}={_describe(value)}" for key, value in kwargs.items()]
    return ", ".join(parts) or "no inputs"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _fingerprint(spec: ModelSpec, found: _Found, model: nn.Module) -> dict[str, str]:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 4096)].cpu()
            sample = torch.view_as_real(sample) if sample.is_complex() else sample
            digest.update(sample.double().numpy().tobytes())
    source = Path(re.sub(r":\w+$", "", found.source))
    return {
        "source": hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else found.source,
        "weights": digest.hexdigest(),
        "inputs": hashlib.sha256(repr((spec.inputs, spec.input_shapes)).encode()).hexdigest(),
    }

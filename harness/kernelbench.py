"""A KernelBench problem file (`Model`, `get_inputs`, `get_init_inputs`) as something that kernels are judged against.

The module becomes a function of its inputs and weights (`harness.module_call`), in eval mode as everywhere in
Overnight: dropout does nothing, norms use their running statistics. Sizes are the problem's own; values are its own
distribution drawn anew, then harder ones, and weights also differ from how they were initialised, so that nobody
wins by knowing that a bias starts at zero. Runs the user's Python; does not protect against what that code does.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from torch import nn

from harness.degenerate import why_degenerate
from harness.errors import InputError, MachineError
from harness.kernelbench_text import ProblemText, arguments_of
from harness.loading import classes_in, first_line, load_module
from harness.module_call import ModuleCall, built, cast, flat, state_of
from harness.problem import FLOATS, Case, Problem, Recipe, TensorDraw, dense, full_dtype
from harness.records import Role, StageName

NEEDED = ("Model", "get_inputs", "get_init_inputs")
COPIES = 8  # of inputs and outputs that a verdict holds at once: several calls in a row, and their float64 truth
SPREAD = 0.25  # how far a weight that is initialised to one value is moved from it, relative to that value
NEAR_ZERO = 0.1  # ... and how far from zero
HARD_VALUES = (Recipe.LARGE, Recipe.SMALL, Recipe.OUTLIERS, Recipe.CONSTANT_ROWS, Recipe.LAST_COLUMN)
STATISTIC = re.compile(r"(^|\.)running_(mean|var)$")


@dataclass(frozen=True)
class KernelBenchProblem:
    """A problem ready to be judged: what to judge, and the text that calls a candidate."""

    problem: Problem
    text: ProblemText


def read_problem(
    path: Path, device: str, *, dtype: str | None = None, sizes: Mapping[str, int] | None = None
) -> KernelBenchProblem:
    """Load a problem file. `sizes` replaces integers at its top level, such as {"batch_size": 16}.

    Raises InputError for what is no such problem, MachineError for one that does not fit into this machine.
    """
    module = load_module(path)
    _check(module, path)
    _resize(module, path, sizes or {})
    kind = full_dtype(dtype) if dtype else "float32"
    try:
        return _Loaded(module, path, device, getattr(torch, kind), dict(sizes or {})).read()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MachineError(_too_large(path, first_line(error))) from error


def _too_large(path: Path, reason: str) -> str:
    return (
        f"{path.name} is too large for this machine ({reason}): give smaller sizes for the whole numbers at its top,"
        " as with --shape batch_size=8"
    )


def free_bytes(device: str) -> int:
    """Memory that is free on a device now."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
    return int(psutil.virtual_memory().available)


def _check(module: ModuleType, path: Path) -> None:
    missing = [name for name in NEEDED if not callable(getattr(module, name, None))]
    if missing:
        there = ", ".join(classes_in(module)) or "no nn.Module class"
        raise InputError(
            f"{path} is no KernelBench problem: it lacks {', '.join(missing)} (it defines {there}); give a file with"
            " Model, get_inputs and get_init_inputs"
        )


def _resize(module: ModuleType, path: Path, sizes: Mapping[str, int]) -> None:
    known = [name for name, value in vars(module).items() if type(value) is int]
    for name, size in sizes.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"--shape names {name}, but the whole numbers at the top of {path.name} are {listed}")
        if size < 1:
            raise InputError(f"--shape {name}={size}: a size must be at least 1")
        setattr(module, name, size)


@dataclass(frozen=True)
class _Loaded:
    """A problem's module on its way to a Problem."""

    module: ModuleType
    path: Path
    device: str
    dtype: torch.dtype
    sizes: Mapping[str, int]

    def read(self) -> KernelBenchProblem:
        self.require_memory()
        init = self.run("get_init_inputs()", self.module.get_init_inputs)
        model = self.run("Model(*get_init_inputs())", lambda: built(self.module.Model, init))
        if not isinstance(model, nn.Module):
            raise InputError(f"{self.path}: Model(...) is a {type(model).__name__}, not an nn.Module")
        weights = state_of(cast(model.to(self.device), self.dtype))
        values = self.values()
        try:
            arguments = arguments_of(values, torch.Tensor)
        except ValueError as error:
            raise InputError(f"{self.path}: get_inputs(): {error}") from error
        names = _names([value for value in values if isinstance(value, torch.Tensor)], model, weights)
        given = len(names) - len(weights)
        call = ModuleCall(model, list(weights), arguments)
        own = _Own(self.tensors, tuple(names[:given]), dict(zip(names[given:], weights.values(), strict=True)))
        if not names:
            raise InputError(f"{self.path}: the model has neither inputs nor weights: nothing to judge")
        self.try_once(call, own, names)
        text = ProblemText(
            str(self.path),
            self.path.read_text(encoding="utf-8"),
            self.sizes,
            str(self.dtype).removeprefix("torch."),
            arguments,
            tuple(names),
            tuple((name, tuple(value.shape)) for name, value in weights.items()),
            init,
        )
        places = dict(zip(names[given:], weights, strict=True))
        return KernelBenchProblem(_problem(self, text, own, call, places), text)

    def run(self, what: str, function: Callable[[], Any]) -> Any:
        """The user's code, its failure said as theirs."""
        try:
            return function()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            if "can't allocate memory" in str(error):
                raise MachineError(_too_large(self.path, first_line(error))) from error
            raise InputError(f"{self.path}: {what} fails: {first_line(error)}; mend the problem file") from error

    def require_memory(self) -> None:
        """Refuse what cannot fit before anything is allocated, judging by the module's tensors on the meta device."""
        try:
            with torch.random.fork_rng(), torch.device("meta"), torch.no_grad():
                values = list(self.module.get_inputs())
                model = built(self.module.Model, self.module.get_init_inputs())
                leaves = flat(model(*values))
        except (Exception, SystemExit):  # noqa: BLE001 - not everything runs on meta; the device's allocator then says so
            return
        tensors = [value for value in (*values, *leaves) if isinstance(value, torch.Tensor)]
        needed = COPIES * sum(value.numel() * value.element_size() for value in tensors)
        free = free_bytes(self.device)
        if needed > free:
            said = f"judging it takes about {needed / 2**30:.3g} GiB, {max(free, 0) / 2**30:.3g} are free"
            raise MachineError(_too_large(self.path, said))

    def values(self) -> list[Any]:
        """Fresh inputs from a secret seed, made on the device."""
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(secrets.randbits(62))
            values = self.run("get_inputs()", self.module.get_inputs)
        if not isinstance(values, list | tuple):
            raise InputError(f"{self.path}: get_inputs() gives a {type(values).__name__}, not a list of inputs")
        return [self.placed(value) for value in values]

    def placed(self, value: Any) -> Any:
        """A tensor on the device, floating ones in the dtype."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among fresh inputs."""
        return [value for value in self.values() if isinstance(value, torch.Tensor)]

    def try_once(self, call: ModuleCall, own: "_Own", names: Sequence[str]) -> None:
        """Run the module, so that one that cannot run is said here and nowhere later."""
        tensors = own()
        with torch.no_grad():
            result = self.run("forward", lambda: call(*(tensors[name] for name in names)))
        leaves = result if isinstance(result, tuple) else (result,)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise InputError(f"{self.path}: Model returns a {type(leaf).__name__}; only tensors can be judged")


@dataclass(frozen=True)
class _Own:
    """Fresh inputs and the weights as initialised, by argument name."""

    draw: Callable[[], list[torch.Tensor]]
    inputs: tuple[str, ...]
    weights: Mapping[str, torch.Tensor]

    def __call__(self) -> dict[str, torch.Tensor]:
        return {**dict(zip(self.inputs, self.draw(), strict=True)), **self.weights}


def _names(inputs: Sequence[torch.Tensor], model: nn.Module, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Argument names of a kernel: the forward's own for inputs, dotted names with underscores for weights."""
    import inspect

    parameters = [
        name for name, p in inspect.signature(model.forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    found: list[str] = []
    wanted = [parameters[index] if index < len(parameters) else f"x{index}" for index in range(len(inputs))]
    for name in [*wanted, *(re.sub(r"\W", "_", name) for name in weights)]:
        plain = name if name.isidentifier() else f"w_{name}"
        number = sum(other == plain or other.startswith(f"{plain}__") for other in found)
        found.append(plain if plain not in found else f"{plain}__{number + 1}")
    return found


def _problem(loaded: _Loaded, text: ProblemText, own: _Own, call: ModuleCall, places: Mapping[str, str]) -> Problem:
    """The cases of a problem: its own values, then drawn ones with weights moved, all at its own sizes."""
    tensors = own()
    with torch.no_grad():
        result = call(*(tensors[name] for name in text.parameters))
        symmetric = _symmetric_inputs(call, tensors, text.parameters, own.inputs, result)
    trained = frozenset(name for name, _ in call.model.named_parameters())
    cases = _Cases(tensors, own.inputs, symmetric, places, trained, text)
    leaves = result if isinstance(result, tuple) else (result,)
    nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    nbytes += sum(tensors[name].numel() * tensors[name].element_size() for name in own.inputs)
    bench = cases.own("time")
    return Problem(
        loaded.path.stem,
        loaded.device,
        text.reference(),
        text.parameters,
        (text.dtype,),
        cases.stages(),
        (bench,),
        (cases.drawn("calibrate", Recipe.NORMAL), cases.drawn("calibrate", Recipe.LAST_COLUMN)),
        bytes={bench.name: nbytes},
        own=own,
        degenerate=lambda oracle: why_degenerate(oracle, cases.own("probe"), cases.moved("probe")),
    )


def _symmetric_inputs(
    call: ModuleCall,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    inputs: Sequence[str],
    result: Any,
) -> frozenset[str]:
    """Floating inputs that may have either sign: the output stays as finite when the input is centred on zero."""

    def finite(value: Any) -> list[int]:
        return [int(leaf.isfinite().sum()) for leaf in (value if isinstance(value, tuple) else (value,))]

    usual, found = finite(result), set()
    for name in inputs:
        value = tensors[name]
        if value.dtype.is_floating_point and value.numel():
            tried = torch.randn_like(value) * value.double().square().mean().sqrt().to(value.dtype)
            if finite(call(*(tried if other == name else tensors[other] for other in names))) == usual:
                found.add(name)
    return frozenset(found)


@dataclass(frozen=True)
class _Cases:
    """Builds the cases of a problem."""

    tensors: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    symmetric: frozenset[str]
    places: Mapping[str, str]
    trained: frozenset[str]  # dotted names of the parameters
    text: ProblemText

    def own(self, label: str) -> Case:
        """The problem's own inputs and weights."""
        draws = (replace(self.draw(name, Recipe.NORMAL), recipe=Recipe.OWN) for name in self.text.parameters)
        return self.case(f"{label}, the problem's own values", draws)

    def moved(self, label: str) -> Case:
        """The problem's own inputs with weights moved from how they were initialised."""
        draws = (
            replace(draw, recipe=Recipe.OWN) if draw.name in self.inputs else draw
            for draw in (self.draw(name, Recipe.NORMAL) for name in self.text.parameters)
        )
        return self.case(f"{label}, its own inputs and other weights", draws)

    def drawn(self, label: str, recipe: Recipe) -> Case:
        """Drawn inputs and weights."""
        said = "drawn values" if recipe is Recipe.NORMAL else str(recipe)
        return self.case(f"{label}, {said}", (self.draw(name, recipe) for name in self.text.parameters))

    def case(self, name: str, draws: Any) -> Case:
        return Case(name, self.text.dtype, tuple(draws))

    def stages(self) -> Mapping[StageName, tuple[Case, ...]]:
        floats = any(self.tensors[name].dtype.is_floating_point for name in self.inputs)
        hard = tuple(self.drawn("values", recipe) for recipe in HARD_VALUES) if floats else (self.moved("values"),)
        return {
            StageName.SMOKE: (self.own("smoke"),),
            StageName.SHAPES: (self.own("shape"), self.moved("shape"), self.drawn("shape", Recipe.NORMAL)),
            StageName.STABILITY: hard,
            StageName.DETERMINISM: (self.drawn("determinism", Recipe.NORMAL),),
            StageName.EDGE: (self.drawn("edge", Recipe.SORTED if floats else Recipe.NORMAL),),
        }

    def draw(self, name: str, recipe: Recipe) -> TensorDraw:
        value = self.tensors[name]
        weight = name not in self.inputs
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        stride = None if value.stride() == dense(shape) else tuple(value.stride())
        if weight and not self.is_trained(name):
            role = Role.WEIGHT if dtype in FLOATS else Role.INDEX
            return TensorDraw(name, role, dtype, shape, Recipe.OWN, stride, fixed=True)
        if dtype not in FLOATS:
            return _integers(name, value, dtype, stride)
        low, mean, high, spread = _range(value, weight=weight, symmetric=name in self.symmetric)
        role = Role.WEIGHT if weight else Role.ACTIVATION
        kind = Recipe.NORMAL if weight else recipe
        return TensorDraw(name, role, dtype, shape, kind, stride, scale=spread, mean=mean, low=low, high=high)

    def is_trained(self, name: str) -> bool:
        """Parameters and the statistics of norms take other values; any other buffer is part of what the op is."""
        place = self.places[name]
        known = place in self.trained or STATISTIC.search(place) is not None
        return known and self.tensors[name].dtype.is_floating_point


def _integers(name: str, value: torch.Tensor, dtype: str, stride: tuple[int, ...] | None) -> TensorDraw:
    if value.dtype is torch.bool:
        mean = float(value.float().mean()) if value.numel() else 0.5
        return TensorDraw(name, Role.MASK, dtype, tuple(value.shape), Recipe.NORMAL, stride, mean=mean, low=0.0)
    low, high = (int(value.min()), int(value.max()) + 1) if value.numel() else (0, 1)
    return TensorDraw(name, Role.INDEX, dtype, tuple(value.shape), Recipe.NORMAL, stride, low=low, high=high)


def _range(value: torch.Tensor, *, weight: bool, symmetric: bool) -> tuple[float, float, float, float]:
    """Low, mean, high and spread of the values to draw, from those that were seen."""
    finite = value.detach().float().flatten()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return -1.0, 0.0, 1.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    mean = float(finite.mean())
    spread = float(finite.std(correction=0)) if finite.numel() > 1 else 0.0
    if weight and spread <= 1e-6 * abs(mean):
        spread = SPREAD * abs(mean) or NEAR_ZERO
        return mean - 2 * spread, mean, mean + 2 * spread, spread
    if symmetric and not weight:
        size = max(abs(low), abs(high)) or 1.0
        return -2 * size, 0.0, 2 * size, float(finite.square().mean().sqrt()) or 1.0
    return low, mean, high, spread or abs(mean) or 1.0

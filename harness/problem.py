"""What the judge needs to know about one target: reference text, arguments, and the cases of every stage.

A `Problem` is built from a named op of `harness/specs/` (`named_problem`) or from a session's `Target` record
(`target_problem`); from there on the judge does not know which of the two it was.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import Any

from harness.errors import InputError
from harness.records import SHORT_DTYPES, Role, Scalar, StageName, Target, TensorSpec

FLOATS = ("float32", "bfloat16", "float16", "float64")
CPU_HALF_ELEMENTS = 2**16
"""Half-precision tensors judged on the CPU hold at most this many elements (contracts: Named ops)."""

SECRET_ELEMENTS = 2**20
NARROW_DRAWS = 3  # a single narrow shape is now and then too narrow to show anything
"""Largest product of two secret sizes, so that inputs and outputs always fit the arena of the known cases."""
FAR_ROWS = 100_000
GPU_SECRETS = 2
SECRET_BINDINGS = 2
"""In-between sizes that a candidate for a session target must meet: the splicer accepts every size in between."""
BINDING_TRIES = 64

Bindings = Mapping[str, int]


class Recipe(StrEnum):
    """How the values of one case are drawn."""

    NORMAL = "normal"
    POSITIVE = "positive"
    LARGE = "large"
    SMALL = "small"
    OFFSET = "offset"
    CANCELLATION = "cancellation"
    CONSTANT_ROWS = "nearly constant rows"
    FADING = "rows fading to zero"
    OUTLIERS = "outliers"
    SORTED = "sorted"
    LAST_COLUMN = "mass on the last column"
    INTEGERS = "small integers"
    NON_FINITE = "inf and nan"
    CAPTURED = "captured"
    OWN = "the problem's own"


class Layout(StrEnum):
    """How a tensor lies in memory."""

    CONTIGUOUS = "contiguous"
    TRANSPOSED = "transposed"
    STRIDED = "every second column"
    SLICED = "a slice of wider rows"
    EXPANDED = "expanded rows"


@dataclass(frozen=True)
class TensorDraw:
    """One input tensor of a case: where it lies and how its values are drawn. `high` is exclusive for integers."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe = Recipe.NORMAL
    stride: tuple[int, ...] | None = None
    scale: float = 1.0
    mean: float = 0.0
    low: float | None = None
    high: float | None = None
    special: tuple[str, ...] = ()
    fixed: bool = False  # a table or mask that belongs to the op: never another value than its own

    @property
    def extent(self) -> int:
        """Elements between the first and the last one, both included."""
        if 0 in self.shape:
            return 0
        if self.stride is None:
            return prod(self.shape)
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Case:
    """One call that the candidate must get right. `sample` is the number of a captured input tuple."""

    name: str
    dtype: str
    inputs: tuple[TensorDraw, ...]
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    exact: bool = False
    sample: int | None = None
    bindings: Bindings = field(default_factory=dict)


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a named op. A dim is a size, a symbol or `SYMBOL/2`; dtype "float" is the judged one."""

    name: str
    dims: tuple[str | int, ...]
    role: Role = Role.ACTIVATION
    dtype: str = "float"
    fan_in: str | None = None  # values are scaled by the square root of this symbol's inverse
    high: str | None = None  # index arguments: exclusive upper bound
    follows_recipe: bool = True


@dataclass(frozen=True)
class NamedOp:
    """One of the nine named ops (contracts: Named ops): the single source of its reference, shapes and values."""

    name: str
    reference: str
    arguments: tuple[Argument, ...]
    cpu: tuple[Bindings, ...]
    cuda: tuple[Bindings, ...]
    ragged: tuple[Bindings, ...]
    edge: tuple[Bindings, ...]
    flops: Callable[[Bindings], int]
    variants: tuple[Mapping[str, Scalar], ...] = ()
    recipes: tuple[Recipe, ...] = ()
    special: tuple[str, ...] = ()
    linear: bool = False
    round_sizes: tuple[str, ...] = ()  # symbols that only take sizes listed in `ragged` (head dims)
    contraction: str | None = None  # the symbol that products are summed over; None: no product sums


@dataclass(frozen=True)
class Problem:
    """Everything the judge knows of one target on one device."""

    target: str
    device: str
    reference: str
    arguments: tuple[str, ...]
    dtypes: tuple[str, ...]
    cases: Mapping[StageName, tuple[Case, ...]]
    bench: tuple[Case, ...]
    calibration: tuple[Case, ...]
    required: tuple[str, ...] = ()  # constants that are passed by keyword
    keywords: bool = True  # False: constants follow the inputs positionally (named ops)
    exact_strides: bool = False
    precision: str = ""
    samples: str | None = None
    secret_cases: Callable[[StageName], tuple[Case, ...]] | None = None  # drawn anew for each candidate
    flops: Mapping[str, int] = field(default_factory=dict)  # by bench case
    bytes: Mapping[str, int] = field(default_factory=dict)
    own: Callable[[], Mapping[str, Any]] | None = None  # fresh tensors by argument, for draws with Recipe.OWN
    degenerate: Callable[[Any], str | None] | None = None  # given the oracle: why nobody could be judged by it

    def __post_init__(self) -> None:
        if not self.bench or not self.cases.get(StageName.SHAPES):
            raise ValueError(f"{self.target}: a problem needs shapes to judge and to time")


def full_dtype(name: str) -> str:
    """`fp16` or `float16` to `float16`; raises InputError for what is not a floating type."""
    dtype = SHORT_DTYPES.get(name, name)
    if dtype not in FLOATS:
        raise InputError(f"dtype {name!r} is not one of fp32, fp16, bf16, fp64")
    return dtype


def size_of(dim: str | int, bindings: Bindings) -> int:
    """The size of one dim under `bindings`: a number, a symbol, `D/2` or a product such as `8*B`."""
    if isinstance(dim, int):
        return dim
    product, _, divisor = dim.partition("/")
    factors = product.split("*")
    size: int = prod(int(factor) if factor.isdigit() else bindings[factor] for factor in factors)
    return size // int(divisor or 1)


def stride_of(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of `shape` in `layout`; None where it is contiguous or the rank does not allow it."""
    if layout is Layout.CONTIGUOUS or not shape:
        return None
    if len(shape) == 1:
        return (2,) if layout is Layout.STRIDED else None
    if layout is Layout.TRANSPOSED:
        return (*dense((*shape[:-2], shape[-1], shape[-2]))[:-2], 1, shape[-2])
    if layout is Layout.STRIDED:
        return tuple(2 * step for step in dense(shape))
    if layout is Layout.SLICED:
        return (*dense((*shape[:-1], shape[-1] + 7))[:-1], 1)
    return (0, *dense(shape)[1:])


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


# ---------------------------------------------------------------------------------------------- named ops


def named_problem(
    op: NamedOp, device: str, *, dtype: str | None = None, shape: Bindings = MappingProxyType({})
) -> Problem:
    """The problem of a named op; `dtype` and `shape` narrow it. Raises InputError for an unknown symbol."""
    symbols = set(op.cpu[0])
    if unknown := set(shape) - symbols:
        raise InputError(f"--shape names {', '.join(sorted(unknown))}, but {op.name} has {', '.join(sorted(symbols))}")
    if bad := [name for name, size in shape.items() if size < 1]:
        raise InputError(f"--shape {bad[0]}={shape[bad[0]]}: a size must be at least 1")
    dtypes = (full_dtype(dtype),) if dtype else ("float32", "bfloat16", "float16")
    real = tuple({**binding, **shape} for binding in (op.cuda if device == "cuda" else op.cpu))
    real = real[:1] if shape else real
    builder = _NamedCases(op, device, dtypes, real, narrowed=bool(shape))
    bench = tuple(builder.case("time", bindings, name) for name in _timed(device, dtypes) for bindings in real)
    return Problem(
        op.name,
        device,
        op.reference,
        tuple(argument.name for argument in op.arguments),
        dtypes,
        builder.stages(),
        bench,
        builder.calibration(),
        keywords=False,
        secret_cases=None if shape else builder.secret_cases,
        flops={case.name: op.flops(case.bindings) for case in bench},
        bytes={case.name: _compulsory_bytes(case) for case in bench},
    )


def _timed(device: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    wanted = ("float16", "float32") if device == "cuda" else ("float32",)
    return tuple(name for name in wanted if name in dtypes) or dtypes[:1]


def _compulsory_bytes(case: Case) -> int:
    return sum(prod(draw.shape) * itemsize(draw.dtype) for draw in case.inputs)


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    sizes = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float16": 2, "bfloat16": 2, "int16": 2}
    return 1 if dtype in {"bool", "uint8", "int8"} else sizes.get(dtype, 4)


@dataclass(frozen=True)
class _NamedCases:
    """Builds the cases of one named op."""

    op: NamedOp
    device: str
    dtypes: tuple[str, ...]
    real: tuple[Bindings, ...]
    narrowed: bool

    def case(
        self,
        label: str,
        bindings: Bindings,
        dtype: str,
        recipe: Recipe = Recipe.NORMAL,
        *,
        layouts: Mapping[str, Layout] = MappingProxyType({}),
        constants: Mapping[str, Scalar] = MappingProxyType({}),
    ) -> Case:
        draws = tuple(self.draw(a, bindings, dtype, recipe, layouts.get(a.name)) for a in self.op.arguments)
        sizes = ",".join(f"{name}={size}" for name, size in bindings.items())
        name = f"{label} {sizes} {dtype}" + ("" if recipe is Recipe.NORMAL else f", {recipe}")
        exact = recipe is Recipe.INTEGERS and self.op.linear
        return Case(name, dtype, draws, dict(constants), exact, None, dict(bindings))

    def draw(
        self, argument: Argument, bindings: Bindings, dtype: str, recipe: Recipe, layout: Layout | None
    ) -> TensorDraw:
        shape = tuple(size_of(dim, bindings) for dim in argument.dims)
        own = dtype if argument.dtype == "float" else argument.dtype
        scale = max(bindings[argument.fan_in], 1) ** -0.5 if argument.fan_in else 1.0
        first = argument is self.op.arguments[0]
        return TensorDraw(
            argument.name,
            argument.role,
            own,
            shape,
            self.recipe_of(argument, recipe, first=first),
            stride_of(layout, shape) if layout else None,
            scale=1.0 if recipe is Recipe.INTEGERS else scale,
            high=size_of(argument.high, bindings) if argument.high else None,
            special=self.op.special,
        )

    def recipe_of(self, argument: Argument, recipe: Recipe, *, first: bool) -> Recipe:
        if recipe in {Recipe.NON_FINITE, Recipe.LARGE, Recipe.SMALL, Recipe.OFFSET, Recipe.FADING} and not first:
            return Recipe.NORMAL
        return recipe if argument.follows_recipe else Recipe.NORMAL

    def fitting(self, bindings: Bindings, dtype: str) -> Bindings:
        """On the CPU half-precision tensors stay small: shrink the largest sizes until every tensor fits."""
        if self.narrowed or self.device == "cuda" or dtype in {"float32", "float64"}:
            return bindings
        sizes = dict(bindings)
        limit = 128 if self.op.contraction else None
        if limit:
            sizes = {name: min(size, limit) for name, size in sizes.items()}
        while max(self.elements(a, sizes) for a in self.op.arguments) > CPU_HALF_ELEMENTS:
            name = max(sizes, key=lambda symbol: sizes[symbol])
            sizes[name] = max(1, sizes[name] // 2)
        return sizes

    def elements(self, argument: Argument, bindings: Bindings) -> int:
        return prod(size_of(dim, bindings) for dim in argument.dims)

    def ragged(self) -> tuple[Bindings, ...]:
        return self.real if self.narrowed else self.op.ragged

    def stages(self) -> Mapping[StageName, tuple[Case, ...]]:
        return {
            StageName.SMOKE: (self.case("smoke", self.fitting(self.ragged()[0], self.dtypes[0]), self.dtypes[0]),),
            StageName.SHAPES: self.shapes(),
            StageName.STABILITY: self.stability(),
            StageName.DETERMINISM: self.determinism(),
            StageName.EDGE: self.edge(),
        }

    def shapes(self) -> tuple[Case, ...]:
        """All shapes in the first dtype; the others at the first and last ragged shape and the real ones.

        Each new pair of shape and dtype may cost a compilation of the candidate, which is most of a GPU verdict.
        """
        found: dict[str, Case] = {}
        for dtype in self.dtypes:
            ragged = self.ragged() if dtype == self.dtypes[0] else (self.ragged()[0], self.ragged()[-1])
            for bindings in (*ragged, *self.real):
                case = self.case("shape", self.fitting(bindings, dtype), dtype)
                found.setdefault(case.name, case)
            for constants in self.op.variants:
                case = self.case("shape", self.fitting(self.ragged()[0], dtype), dtype, constants=constants)
                said = ", ".join(f"{name}={value}" for name, value in constants.items())
                name = f"{case.name}, {said}"
                found[name] = Case(name, dtype, case.inputs, constants, bindings=case.bindings)
        return tuple(found.values())

    def secret_cases(self, stage: StageName) -> tuple[Case, ...]:
        """Combinations that nobody can know; fewer on a GPU, where each may be compiled."""
        builders: dict[StageName, Callable[[], tuple[Case, ...]]] = {
            StageName.SHAPES: self.secret_shapes,
            StageName.STABILITY: self.secret_values,
            StageName.EDGE: self.secret_layouts,
        }
        cases = builders[stage]() if stage in builders else ()
        if self.device == "cuda" and len(cases) > GPU_SECRETS:
            return tuple(secrets.SystemRandom().sample(cases, GPU_SECRETS))
        return cases

    def secret_shapes(self) -> tuple[Case, ...]:
        """Between the ragged shapes in the first dtype and the half types, and anywhere from smallest to real."""
        main, half = self.dtypes[0], self.dtypes[-2:]
        drawn = (
            (main, self.secret_sizes(self.op.ragged)),
            *((dtype, self.secret_sizes(self.op.ragged)) for dtype in (*half, secrets.choice(half))),
            (main, self.secret_sizes((*self.op.edge, *self.op.ragged, *self.real))),
        )
        far = tuple((main, sizes) for sizes in self.far_sizes())
        return tuple(self.case("secret shape", self.fitting(sizes, dtype), dtype) for dtype, sizes in (*drawn, *far))

    def far_sizes(self) -> Iterator[Bindings]:
        """For ops over rows: more rows, and wider ones, than a grid or a block of the usual limits holds."""
        if set(self.op.ragged[0]) != {"M", "N"}:
            return
        yield {"M": _between(1 << 16, FAR_ROWS) + 1, "N": _between(1, 8)}
        yield {"M": 1 + secrets.randbelow(3), "N": _between(1 << 14, 1 << 16)}

    def secret_values(self) -> tuple[Case, ...]:
        """Hard values at a shape that is timed, and at a small one: elsewhere timed shapes get easy values alone."""
        main, real = self.dtypes[0], secrets.choice(self.real)
        hard = tuple(
            dict.fromkeys((self.op.recipes[min(1, len(self.op.recipes) - 1)], secrets.choice(self.op.recipes)))
        )
        narrow = [self.secret_sizes((*self.op.edge, self.op.ragged[0])) for _ in range(NARROW_DRAWS)]
        timed = tuple(self.case("secret values", self.fitting(real, main), main, recipe) for recipe in hard)
        return (*timed, *(self.case("secret values", sizes, main, recipe) for sizes in narrow for recipe in hard))

    def secret_layouts(self) -> tuple[Case, ...]:
        """Views at a shape that is timed, each argument in a layout of its own."""
        main, real = self.dtypes[0], secrets.choice(self.real)
        sizes = self.fitting(real, main)
        return tuple(
            self.view(sizes, main, {a.name: self.secret_layout(a, sizes) for a in self.op.arguments}) for _ in "ab"
        )

    def secret_layout(self, argument: Argument, bindings: Bindings) -> Layout:
        """Any layout that changes something; contiguous once in a while where other arguments may be views."""
        fitting = [layout for layout in Layout if self.lays_out(argument, layout, bindings)]
        if len(self.op.arguments) > 1:
            fitting.append(Layout.CONTIGUOUS)
        return secrets.choice(fitting) if fitting else Layout.CONTIGUOUS

    def secret_sizes(self, between: tuple[Bindings, ...]) -> Bindings:
        """Each symbol somewhere between its smallest and largest size, small ones as likely as large ones."""
        sizes = {}
        for symbol in self.op.ragged[0]:
            known = sorted(size for bindings in between if (size := bindings[symbol]))
            free = symbol not in self.op.round_sizes
            sizes[symbol] = _between(known[0], known[-1]) if free else secrets.choice(known)
        while prod(sorted(sizes.values())[-2:]) > SECRET_ELEMENTS or self.total(sizes) > SECRET_ELEMENTS:
            largest = max((name for name in sizes if name not in self.op.round_sizes), key=lambda name: sizes[name])
            sizes[largest] = max(1, sizes[largest] // 2 + secrets.randbelow(2))
        return sizes

    def total(self, bindings: Bindings) -> int:
        return max(self.elements(argument, bindings) for argument in self.op.arguments)

    def stability(self) -> tuple[Case, ...]:
        cases = [
            self.case("values", self.fitting(self.ragged()[index % choice], dtype), dtype, recipe)
            for dtype, choice in zip(self.dtypes, (len(self.ragged()), 1, 1), strict=False)
            for index, recipe in enumerate(self.recipes())
        ]
        return tuple(cases)

    def recipes(self) -> tuple[Recipe, ...]:
        special = (Recipe.NON_FINITE,) if self.op.special else ()
        integers = (Recipe.INTEGERS,) if self.op.linear else ()
        return (*self.op.recipes, *integers, *special)

    def determinism(self) -> tuple[Case, ...]:
        main = self.dtypes[0]
        return (
            self.case("determinism", self.fitting(self.real[0], main), main),
            self.case("determinism", self.fitting(self.ragged()[0], main), main, Recipe.INTEGERS),
        )

    def edge(self) -> tuple[Case, ...]:
        cases = []
        for dtype in self.dtypes:
            first = dtype == self.dtypes[0]
            if not self.narrowed:
                cases += [self.case("edge", bindings, dtype) for bindings in self.op.edge[: None if first else 2]]
            small = self.fitting(self.ragged()[0], dtype)
            for layout in list(Layout)[1:] if first else (Layout.TRANSPOSED, Layout.SLICED):
                layouts = {a.name: layout for a in self.op.arguments if self.lays_out(a, layout, small)}
                if layouts:
                    cases.append(self.view(small, dtype, layouts, f"{layout}"))
        if len(self.op.arguments) > 1:
            small = self.fitting(self.ragged()[0], self.dtypes[0])
            turned = (a for a in self.op.arguments if self.lays_out(a, Layout.TRANSPOSED, small))
            cases += [self.view(small, self.dtypes[0], {a.name: Layout.TRANSPOSED}) for a in turned]
        return tuple(cases)

    def view(self, bindings: Bindings, dtype: str, layouts: Mapping[str, Layout], said: str = "") -> Case:
        case = self.case("view", bindings, dtype, layouts=layouts)
        said = said or ", ".join(f"{name} {layout}" for name, layout in layouts.items())
        return Case(f"{case.name}, {said}", dtype, case.inputs, bindings=case.bindings)

    def lays_out(self, argument: Argument, layout: Layout, bindings: Bindings) -> bool:
        shape = tuple(size_of(dim, bindings) for dim in argument.dims)
        return stride_of(layout, shape) is not None

    def calibration(self) -> tuple[Case, ...]:
        return tuple(
            self.case("calibrate", self.fitting(self.ragged()[0], dtype), dtype, recipe)
            for dtype in self.dtypes
            for recipe in (Recipe.POSITIVE, Recipe.LAST_COLUMN, Recipe.NORMAL)
        )


def _between(low: int, high: int) -> int:
    """A secret size in [low, high], evenly spread over its logarithm."""
    spread: float = low * (high / low) ** secrets.SystemRandom().random()
    return min(high, max(low, round(spread)))


# ---------------------------------------------------------------------------------------------- session targets


def target_problem(target: Target, device: str, samples: str | None, sample_count: int) -> Problem:
    """The problem of a session's target: all its bindings, its captured values, its own dtypes and strides."""
    builder = _TargetCases(target, sample_count)
    bench = (builder.timed(),)
    return Problem(
        target.id,
        device,
        target.reference,
        tuple(spec.name for spec in target.inputs),
        (builder.dtype(),),
        builder.stages(),
        bench,
        builder.calibration(),
        required=tuple(target.constants),
        exact_strides=True,
        precision=target.precision,
        samples=samples,
        secret_cases=builder.secret_cases,
        flops={bench[0].name: target.flops},
        bytes={bench[0].name: target.bytes},
    )


@dataclass(frozen=True)
class _TargetCases:
    """Builds the cases of one session target."""

    target: Target
    sample_count: int

    def dtype(self) -> str:
        floats = [spec.dtype for spec in (*self.target.outputs, *self.target.inputs) if spec.dtype in FLOATS]
        return floats[0] if floats else self.target.outputs[0].dtype

    def case(self, label: str, bindings: Bindings, recipe: Recipe) -> Case:
        draws = tuple(self.draw(spec, bindings, recipe) for spec in self.target.inputs)
        sizes = ",".join(f"{name}={size}" for name, size in bindings.items()) or "captured sizes"
        name = f"{label} {sizes}" + ("" if recipe is Recipe.NORMAL else f", {recipe}")
        return Case(name, self.dtype(), draws, self.target.constants, bindings=bindings)

    def draw(self, spec: TensorSpec, bindings: Bindings, recipe: Recipe) -> TensorDraw:
        shape = tuple(size_of(dim, bindings) for dim in spec.dims)
        seen = spec.values
        integral = spec.dtype not in FLOATS
        spread = seen.std if seen and seen.std > 0 else (abs(seen.mean) if seen else 0.0) or 1.0
        return TensorDraw(
            spec.name,
            spec.role,
            spec.dtype,
            shape,
            recipe if spec.role is Role.ACTIVATION else Recipe.NORMAL,
            strides_like(spec, shape),
            scale=spread,
            mean=seen.mean if seen else 0.0,
            low=seen.low if seen else None,
            high=(seen.high + 1 if integral else seen.high) if seen else None,
        )

    def stages(self) -> Mapping[StageName, tuple[Case, ...]]:
        first = self.target.bindings[0]
        shapes = [self.case("shape", bindings, Recipe.NORMAL) for bindings in self.target.bindings]
        values = [
            self.case("values", first, recipe)
            for recipe in (Recipe.LARGE, Recipe.SMALL, Recipe.OUTLIERS, Recipe.CONSTANT_ROWS, Recipe.LAST_COLUMN)
        ]
        return {
            StageName.SMOKE: (self.case("smoke", first, Recipe.NORMAL),),
            StageName.SHAPES: (*shapes, *(self.captured(index) for index in range(self.sample_count))),
            StageName.STABILITY: tuple(values),
            StageName.DETERMINISM: (self.case("determinism", first, Recipe.NORMAL),),
            StageName.EDGE: tuple(self.case("edge", bindings, Recipe.NORMAL) for bindings in self.target.bindings[-1:]),
        }

    def secret_cases(self, stage: StageName) -> tuple[Case, ...]:
        """Sizes between those of `Target.bindings`, no larger in all than the largest of them: the arena must hold."""
        if stage is not StageName.SHAPES:
            return ()
        known = self.target.bindings
        room = max(self.elements(bindings) for bindings in known)
        found: list[Bindings] = []
        for _ in range(BINDING_TRIES):
            drawn = self.between()
            if drawn not in known and drawn not in found and self.elements(drawn) <= room:
                found.append(drawn)
            if len(found) == SECRET_BINDINGS:
                break
        return tuple(self.case("secret shape", bindings, Recipe.NORMAL) for bindings in found)

    def between(self) -> Bindings:
        """Each symbol somewhere from its smallest to its largest size, where the splicer would use the kernel."""
        drawn = {}
        for symbol in self.target.bindings[0]:
            sizes = [bindings[symbol] for bindings in self.target.bindings if symbol in bindings]
            drawn[symbol] = min(sizes) + secrets.randbelow(max(sizes) - min(sizes) + 1)
        return drawn

    def elements(self, bindings: Bindings) -> int:
        specs = (*self.target.inputs, *self.target.outputs)
        return sum(prod(size_of(dim, bindings) for dim in spec.dims) for spec in specs)

    def timed(self) -> Case:
        """Fresh values under the model's own masks: what a mask hides is work that need not be done."""
        case = self.case("time", self.target.bindings[0], Recipe.NORMAL)
        draws = (
            replace(draw, recipe=Recipe.CAPTURED, fixed=True) if draw.role is Role.MASK and self.sample_count else draw
            for draw in case.inputs
        )
        return replace(case, inputs=tuple(draws))

    def captured(self, index: int) -> Case:
        case = self.case(f"captured call {index}", self.target.bindings[0], Recipe.CAPTURED)
        return Case(case.name, case.dtype, case.inputs, case.constants, sample=index, bindings=case.bindings)

    def calibration(self) -> tuple[Case, ...]:
        first = self.target.bindings[0]
        recipes = (Recipe.POSITIVE, Recipe.LAST_COLUMN, Recipe.NORMAL)
        return tuple(self.case("calibrate", first, recipe) for recipe in recipes)


def strides_like(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The captured strides at the captured shape; at another one the same order of dims, dense, expanded dims kept."""
    if shape == spec.shape:
        return None if spec.stride == dense(shape) else spec.stride
    order = sorted(range(len(shape)), key=lambda axis: (-spec.stride[axis], axis))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        if spec.stride[axis] == 0 and spec.shape[axis] > 1:
            continue
        strides[axis] = step
        step *= max(shape[axis], 1)
    return None if tuple(strides) == dense(shape) else tuple(strides)

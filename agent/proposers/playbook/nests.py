"""Turns a traced region into loop nests: which axes are loops, how tensors are addressed, what runs in which pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.proposers.playbook.sizes import ONE, Group, Size, Unsupported, product
from agent.proposers.playbook.values import Reduction, Region, Value, reachable, redirect
from harness.records import Target, TensorSpec


@dataclass(frozen=True)
class Coefficient:
    """How far one step along an axis moves in memory: a size, times a stride that is known only at run time."""

    size: Size
    stride: str = ""

    def scaled(self, size: Size) -> "Coefficient":
        """This coefficient times a size."""
        return Coefficient(self.size * size, self.stride)

    @property
    def text(self) -> str:
        """C source."""
        if not self.stride:
            return self.size.text
        return self.stride if self.size == ONE else f"{self.stride} * {self.size.text}"


@dataclass(frozen=True)
class Tensor:
    """An input or output in memory.

    `order` lists its dims from the slowest to the fastest; the strides of a `strided` one are read at run time.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    order: tuple[int, ...]
    strided: bool
    coefficients: dict[int, Coefficient]
    paired: bool = False  # complex64, addressed as pairs of floats


@dataclass(frozen=True)
class Loop:
    """One loop: an axis, or several adjacent ones that every tensor walks as one."""

    name: str
    leaves: tuple[int, ...]
    size: Size


@dataclass
class Nest:
    """Loops that compute some of the outputs: `outer` in parallel, `row` inside, its last loop vectorised."""

    outputs: list[int]
    outer: list[Loop]
    row: list[Loop]
    reductions: list[Value] = field(default_factory=list)


@dataclass
class Plan:
    """Everything a printer needs."""

    target: Target
    region: Region
    inputs: list[Tensor]
    outputs: list[Tensor]
    nests: list[Nest]
    symbols: dict[str, tuple[int, int]]  # where a size symbol is read: (input, dim)


def plan(target: Target, region: Region) -> Plan:
    """Plan the nests. Raises Unsupported where outputs cannot be computed row by row."""
    _check_axes(region)
    inputs = [_input(region, load, target.inputs[load.payload]) for load in region.loads]
    outputs = [_output(region, value, spec) for value, spec in zip(region.outputs, target.outputs, strict=True)]
    symbols: dict[str, tuple[int, int]] = {}
    for index, spec in enumerate(target.inputs):
        for place, dim in enumerate(spec.dims):
            if isinstance(dim, str):
                symbols.setdefault(dim, (index, place))
    captured = {name: target.inputs[index].shape[place] for name, (index, place) in symbols.items()}
    planned = Plan(target, region, inputs, outputs, [], symbols)
    for members in _grouped(region):
        planned.nests.append(_nest(planned, members, captured))
    return planned


def _check_axes(region: Region) -> None:
    for value in reachable(region.outputs):
        leaves = region.leaves(value)
        if len(set(leaves)) != len(leaves):
            raise Unsupported("an axis occurs twice in one value")


def dense_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dims from slowest to fastest if the captured tensor is dense in some order, else None."""
    places = sorted(range(len(spec.shape)), key=lambda place: (-spec.stride[place], place))
    places = _ones_in_place(spec, places)
    expected = 1
    for place in reversed(places):
        if spec.shape[place] != 1 and spec.stride[place] != expected:
            return None
        expected *= spec.shape[place]
    return tuple(places)


def _ones_in_place(spec: TensorSpec, places: list[int]) -> list[int]:
    """Dims of size one go where they stand in the shape if the others are in order: their stride says nothing."""
    real = [place for place in places if spec.shape[place] != 1]
    return list(range(len(places))) if real == sorted(real) else places


def _symbolic(dims: Sequence[int | str]) -> tuple[Size, ...]:
    return tuple(Size(dim) if isinstance(dim, int) else Size(1, (dim,)) for dim in dims)


def _input(region: Region, load: Value, spec: TensorSpec) -> Tensor:
    shape, order = _symbolic(spec.dims), dense_order(spec)
    paired = len(load.dims) > len(spec.dims)
    scale = Size(2) if paired else ONE
    strides = _run_time_strides(spec, scale) if order is None else _dense_strides(shape, order, scale)
    coefficients = _coefficients(region, load.dims, [*strides, Coefficient(ONE)])
    known = order or tuple(range(len(shape)))
    return Tensor(spec.name, load.dtype, shape, known, order is None, coefficients, paired)


def _dense_strides(shape: Sequence[Size], order: Sequence[int], step: Size) -> list[Coefficient]:
    strides = [Coefficient(ONE)] * len(shape)
    for place in reversed(order):
        strides[place] = Coefficient(step)
        step = step * shape[place]
    return strides


def _run_time_strides(spec: TensorSpec, scale: Size) -> list[Coefficient]:
    """Strides read at run time; only a captured stride of one is relied upon."""
    return [
        Coefficient(scale, "" if stride == 1 and size != 1 else f"{spec.name}_stride{place}")
        for place, (stride, size) in enumerate(zip(spec.stride, spec.shape, strict=True))
    ]


def _output(region: Region, value: Value, spec: TensorSpec) -> Tensor:
    order = dense_order(spec)
    if order is None:
        raise Unsupported(f"output {spec.name} is not dense")
    shape = tuple(region.axes.extent(region.axes.leaves(group)) for group in value.dims)
    if len(shape) != len(spec.dims):
        raise Unsupported(f"output {spec.name} has rank {len(shape)}, not {len(spec.dims)}")
    coefficients = _coefficients(region, value.dims, _dense_strides(shape, order, ONE))
    return Tensor(spec.name, spec.dtype, shape, order, strided=False, coefficients=coefficients)


def _coefficients(region: Region, dims: Sequence[Group], strides: Sequence[Coefficient]) -> dict[int, Coefficient]:
    found: dict[int, Coefficient] = {}
    for group, stride in zip(dims, strides, strict=False):
        step = ONE
        for leaf in reversed(region.axes.leaves(group)):
            found[leaf] = stride.scaled(step)
            step = step * region.axes.size(leaf)
    return found


def _reduces(region: Region, value: Value) -> list[Value]:
    """The reductions over loops that a value needs."""
    return [v for v in reachable([value]) if v.op == "reduce" and reduced_loops(region, v)]


def reduced_loops(region: Region, value: Value) -> frozenset[int]:
    """The loop axes that a reduction runs over."""
    reduction: Reduction = value.payload
    leaves = region.axes.leaves(reduction.group)
    return frozenset(leaf for leaf in leaves if not region.axes.is_static(leaf))


def _grouped(region: Region) -> list[list[int]]:
    """Outputs that share one iteration space."""
    groups: dict[frozenset[int], list[int]] = {}
    for index, value in enumerate(region.outputs):
        space = region.loops(value)
        for reduce in _reduces(region, value):
            space |= reduced_loops(region, reduce)
        groups.setdefault(space, []).append(index)
    return list(groups.values())


def _nest(planned: Plan, members: list[int], captured: dict[str, int]) -> Nest:
    region = planned.region
    reductions = {id(r): r for index in members for r in _reduces(region, region.outputs[index])}
    rows = {reduced_loops(region, r) for r in reductions.values()}
    if len(rows) > 1:
        raise Unsupported("reductions over different axes")
    row = next(iter(rows), frozenset())
    space = row.union(*(region.loops(region.outputs[index]) for index in members))
    for value in reachable([region.outputs[index] for index in members]):
        if not region.loops(value) <= space:
            raise Unsupported("a value outside the outputs' iteration space")
    used = _tensors(planned, members)

    def weight(leaf: int) -> tuple[int, int]:
        for tensor in used:
            if leaf in tensor.coefficients:
                coefficient = tensor.coefficients[leaf]
                step = coefficient.size.at(captured) * (_captured_stride(planned, coefficient.stride) or 1)
                return (-step, leaf)
        raise Unsupported("an axis that no tensor has")

    ordered = sorted(space, key=weight)
    outer = [leaf for leaf in ordered if leaf not in row]
    inner = [leaf for leaf in ordered if leaf in row]
    if not row:
        outer_loops, inner_loops = _pointwise(planned, outer, used)
    else:
        outer_loops, inner_loops = _merged(planned, outer, used), _merged(planned, inner, used)
    named_outer = [Loop(f"i{n}", leaves, _extent(planned, leaves)) for n, leaves in enumerate(outer_loops)]
    names = [f"k{n}" for n in range(len(inner_loops) - 1)] + ["j"]
    named_row = [Loop(name, leaves, _extent(planned, leaves)) for name, leaves in zip(names, inner_loops, strict=False)]
    return Nest(members, named_outer, named_row, list(reductions.values()))


def _captured_stride(planned: Plan, name: str) -> int | None:
    for spec in planned.target.inputs:
        for place, stride in enumerate(spec.stride):
            if name == f"{spec.name}_stride{place}":
                return stride
    return None


def _tensors(planned: Plan, members: list[int]) -> list[Tensor]:
    """Outputs first: their layout decides the order of loops."""
    needed = {id(v) for v in reachable([planned.region.outputs[index] for index in members])}
    loads = [planned.inputs[n] for n, load in enumerate(planned.region.loads) if id(load) in needed]
    outputs = sorted((planned.outputs[index] for index in members), key=lambda tensor: -len(tensor.coefficients))
    return outputs + sorted(loads, key=lambda tensor: -len(tensor.coefficients))


def _extent(planned: Plan, leaves: Sequence[int]) -> Size:
    return product([planned.region.axes.size(leaf) for leaf in leaves])


def _pointwise(planned: Plan, ordered: list[int], used: list[Tensor]) -> tuple[list[Group], list[Group]]:
    merged = _merged(planned, ordered, used)
    return merged[:-1], merged[-1:]


def _merged(planned: Plan, ordered: list[int], used: list[Tensor]) -> list[Group]:
    """Join neighbouring axes that every tensor walks as one."""
    loops: list[Group] = []
    for leaf in ordered:
        if loops and all(_joined(planned, tensor, loops[-1][-1], leaf) for tensor in used):
            loops[-1] = (*loops[-1], leaf)
        else:
            loops.append((leaf,))
    return loops


def _joined(planned: Plan, tensor: Tensor, outer: int, inner: int) -> bool:
    first, second = tensor.coefficients.get(outer), tensor.coefficients.get(inner)
    if first is None or second is None:
        return first is second
    return first == second.scaled(planned.region.axes.size(inner))


def resolve(region: Region, value: Value, coordinates: dict[int, int]) -> tuple[Value, dict[int, int]]:
    """The value that is computed, with only the coordinates that it depends on."""
    value, coordinates = redirect(region.axes, value, coordinates)
    return value, {leaf: coordinates[leaf] for leaf in region.statics(value)}


def out_names(plan: Plan) -> list[str]:
    """C names of the outputs, distinct from the inputs'."""
    return ["out" if len(plan.outputs) == 1 else f"out{n}" for n in range(len(plan.outputs))]


def stride_names(plan: Plan) -> list[str]:
    """The run-time strides that the kernel takes, in order."""
    names: list[str] = []
    for tensor in plan.inputs:
        names += [c.stride for c in _ordered(tensor) if c.stride and c.stride not in names]
    return names


def _ordered(tensor: Tensor) -> list[Coefficient]:
    return sorted(tensor.coefficients.values(), key=lambda c: c.stride)


def constant_names(plan: Plan) -> list[str]:
    """The target's float constants, which the kernel takes as arguments."""
    return [name for name, value in plan.target.constants.items() if isinstance(value, float) and math.isfinite(value)]

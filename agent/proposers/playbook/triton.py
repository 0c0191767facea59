"""Prints a planned region as Triton kernels: a block of whole rows per program, float32 inside, masks at the edges."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from agent.proposers.playbook.nests import Coefficient, Loop, Nest, Plan, Tensor, out_names, reduced_loops, resolve
from agent.proposers.playbook.sizes import Size, Unsupported, product
from agent.proposers.playbook.values import INTEGERS, Reduction, Value

STORAGE = {
    "float32": "tl.float32",
    "bfloat16": "tl.bfloat16",
    "float16": "tl.float16",
    "int64": "tl.int64",
    "int32": "tl.int32",
    "bool": "tl.int1",
}
EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "1.0 / tl.sqrt_rn({0})",
    "exp": "libdevice.exp({0})",
    "power": "tl.exp({0})",
    "log": "libdevice.log({0})",
    "tanh": "libdevice.tanh({0})",
    "erf": "libdevice.erf({0})",
    "sin": "libdevice.sin({0})",
    "cos": "libdevice.cos({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "pow": "libdevice.pow({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "where": "tl.where({0}, {1}, {2})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "not": "{0} == 0",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
}
WIDEST_ROW = 32768  # columns of one program; longer rows would not fit its registers
WORDS = """
False None True and as assert async await break class continue def del elif else except finally for from global if
import in is lambda nonlocal not or pass raise return try while with rows columns row column inside mask tl triton
libdevice torch float int bool max min sum ROWS BLOCK blocks
"""
RESERVED = frozenset(WORDS.split())
Key = tuple[int, tuple[tuple[int, int], ...]]


def literal(value: float, dtype: str) -> str:
    """Triton source of a number."""
    if isinstance(value, bool):
        return str(value)
    if dtype in INTEGERS and float(value).is_integer():
        return str(int(value))
    return repr(float(value)) if math.isfinite(value) else f'float("{value}")'


class NestPrinter:
    """One `@triton.jit` function."""

    def __init__(self, plan: Plan, nest: Nest, name: str) -> None:
        self.plan, self.nest, self.name = plan, nest, name
        self.region = plan.region
        self.row_leaves = frozenset(leaf for loop in nest.row for leaf in loop.leaves)
        self.lines: list[str] = []
        self.known: dict[Key, str] = {}
        self.taken: set[str] = set()
        self.columns = product([loop.size for loop in nest.row])
        self.rows = product([loop.size for loop in nest.outer])
        if nest.reductions and (self.columns.constant or 0) > WIDEST_ROW:
            raise Unsupported(f"rows of {self.columns.text} are too long for one program")
        self.used: dict[str, None] = {}

    @property
    def whole_row(self) -> bool:
        """Whether a program needs all columns of its rows."""
        return bool(self.nest.reductions)

    @property
    def flat(self) -> bool:
        """Whether there are no rows, only one long run of elements."""
        return not self.nest.outer and not self.nest.reductions

    def text(self) -> str:
        """The function's source."""
        for index in self.nest.outputs:
            self._store(index)
        head = self._head()
        shape = ["BLOCK: tl.constexpr"] if self.flat else ["ROWS: tl.constexpr", "BLOCK: tl.constexpr"]
        signature = ", ".join([*self.parameters(), *shape])
        return f"@triton.jit\ndef {self.name}({signature}):\n" + "\n".join(
            "    " + line for line in [*head, *self.lines]
        )

    def parameters(self) -> list[str]:
        """Pointers in use, sizes, strides, constants."""
        return list(self.used)

    def _head(self) -> list[str]:
        if self.flat:
            start = "tl.program_id(0).to(tl.int64) * BLOCK"
            lines = [f"column = {start} + tl.arange(0, BLOCK)", f"inside_columns = column < {self._size(self.columns)}"]
            return lines + _decode("column", self.nest.row, self._size)
        if self.whole_row:
            lines = ["row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]"]
            lines.append("column = tl.arange(0, BLOCK)[None, :]")
        else:
            lines = [f"blocks = tl.cdiv({self._size(self.columns)}, BLOCK)"]
            lines.append("row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]")
            lines.append("column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]")
        lines.append(f"inside_rows = row < {self._size(self.rows)}")
        lines.append(f"inside_columns = column < {self._size(self.columns)}")
        lines.append("inside = inside_rows & inside_columns")
        return lines + _decode("row", self.nest.outer, self._size) + _decode("column", self.nest.row, self._size)

    def _size(self, size: Size) -> str:
        for symbol in size.symbols:
            self.used.setdefault(symbol)
        return size.text

    def _statics(self, value: Value, leaves: Sequence[int] | None = None) -> Iterator[dict[int, int]]:
        axes = self.region.statics(value) if leaves is None else tuple(leaves)
        for places in itertools.product(*[range(self.region.axes.size(leaf).factor) for leaf in axes]):
            yield dict(zip(axes, places, strict=True))

    def evaluate(self, value: Value, coordinates: dict[int, int]) -> str:
        """The name or literal of a value; emits what it needs."""
        value, place = resolve(self.region, value, coordinates)
        coordinates = {**coordinates, **place}
        if value.op == "literal":
            return literal(value.payload, value.dtype)
        if value.op == "constant":
            self.used.setdefault(value.name)
            return value.name
        if value.op == "size":
            text = self._size(value.payload)
            return f"({text}).to(tl.float32)" if value.payload.symbols else f"{value.payload.factor}.0"
        key = (id(value), tuple(sorted(place.items())))
        if key not in self.known:
            expression = self._expression(value, place, coordinates)
            self.known[key] = self._fresh(value, place)
            self.lines.append(f"{self.known[key]} = {expression}")
        return self.known[key]

    def _expression(self, value: Value, place: dict[int, int], coordinates: dict[int, int]) -> str:
        if value.op == "load":
            return self._load(self.plan.inputs[value.payload], place)
        if value.op == "reduce":
            return self._reduce(value, place)
        arguments = [self.evaluate(argument, coordinates) for argument in value.args]
        if value.op == "cast":
            return self._cast(value, arguments[0])
        if value.op not in EXPRESSIONS:
            raise Unsupported(f"no Triton for {value.op}")
        return EXPRESSIONS[value.op].format(*(f"({a})" if a.startswith("-") else a for a in arguments))

    def _cast(self, value: Value, text: str) -> str:
        if value.dtype == "bool":
            return f"{text} != 0"
        if value.dtype == "float32":
            return f"{text}.to(tl.float32)" if value.args[0].dtype in (*INTEGERS, "bool") else text
        back = "" if value.dtype in INTEGERS else ".to(tl.float32)"
        return f"{text}.to({STORAGE[value.dtype]}){back}"

    def _reduce(self, value: Value, place: dict[int, int]) -> str:
        reduction: Reduction = value.payload
        leaves = [leaf for leaf in self.region.axes.leaves(reduction.group) if self.region.axes.is_static(leaf)]
        terms = [self.evaluate(value.args[0], {**place, **inner}) for inner in self._statics(value, leaves)]
        total = _combined(reduction.kind, terms)
        if not reduced_loops(self.region, value):
            return total
        if reduction.kind == "sum":
            return f"tl.sum(tl.where(inside_columns, {total}, 0.0), axis=1, keep_dims=True)"
        edge = 'float("-inf")' if reduction.kind == "max" else 'float("inf")'
        best = f"tl.{reduction.kind}(tl.where(inside_columns, {total}, {edge}), axis=1, keep_dims=True)"
        if not reduction.exact_nan:
            return best
        flag = f"tl.max(tl.where(inside_columns & ({total} != {total}), 1, 0), axis=1, keep_dims=True)"
        return f'tl.where({flag} > 0, float("nan"), {best})'

    def _load(self, tensor: Tensor, place: dict[int, int]) -> str:
        address, mask = self._address(tensor, tensor.name, place)
        wide = ".to(tl.float32)" if tensor.dtype in ("bfloat16", "float16") else ""
        if tensor.dtype == "bool":
            wide = " != 0"
        return f"tl.load({address}{mask}){wide}"

    def _store(self, index: int) -> None:
        value, tensor, name = self.region.outputs[index], self.plan.outputs[index], out_names(self.plan)[index]
        loops = self.region.loops(value)
        partial = loops & self.row_leaves and not self.row_leaves <= loops
        if partial:
            raise Unsupported("an output that varies along a part of the row")
        for place in self._statics(value):
            text = self.evaluate(value, place)
            address, mask = self._address(tensor, name, place)
            self.lines.append(f"tl.store({address}, {text}{mask})")

    def _address(self, tensor: Tensor, name: str, place: dict[int, int]) -> tuple[str, str]:
        self.used.setdefault(f"{name}_ptr")
        parts = [f"{name}_ptr"]
        by_row = [self._step(loop, tensor) for loop in self.nest.outer]
        by_column = [self._step(loop, tensor) for loop in self.nest.row]
        parts += [part for part in (*by_row, *by_column) if part]
        for leaf, at in place.items():
            coefficient = tensor.coefficients[leaf]
            if at:
                parts.append(self._scaled(str(at), coefficient))
        masks = [n for n, used in (("inside_rows", any(by_row)), ("inside_columns", any(by_column))) if used]
        mask = {0: "", 1: f", mask={masks[0] if masks else ''}", 2: ", mask=inside"}[len(masks)]
        return " + ".join(parts), mask

    def _scaled(self, factor: str, coefficient: Coefficient) -> str:
        if coefficient.stride:
            self.used.setdefault(coefficient.stride)
        if not coefficient.stride and not coefficient.size.symbols and factor.isdigit():
            return str(int(factor) * coefficient.size.factor)
        self._size(coefficient.size)
        return factor if coefficient == Coefficient(Size(1)) else f"{factor} * {coefficient.text}"

    def _step(self, loop: Loop, tensor: Tensor) -> str:
        coefficient = tensor.coefficients.get(loop.leaves[-1])
        if coefficient is None:
            return ""
        return self._scaled(_index_name(loop, self.nest), coefficient)

    def _fresh(self, value: Value, place: dict[int, int]) -> str:
        base = re.sub(r"\W", "_", value.name or value.op) + "".join(f"_{at}" for at in place.values())
        used = RESERVED | self.taken | set(self.plan.symbols) | set(self.plan.target.constants)
        name, number = base, 1
        while name in used or name.endswith("_ptr"):
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


def _combined(kind: str, terms: Sequence[str]) -> str:
    if kind == "sum":
        return " + ".join(terms)
    text = terms[0]
    for term in terms[1:]:
        text = f"tl.{'maximum' if kind == 'max' else 'minimum'}({text}, {term}, propagate_nan=tl.PropagateNan.ALL)"
    return text


def _index_name(loop: Loop, nest: Nest) -> str:
    if len(nest.outer) == 1 and loop in nest.outer:
        return "row"
    if len(nest.row) == 1 and loop in nest.row:
        return "column"
    return loop.name


def _decode(source: str, loops: Sequence[Loop], size: "object") -> list[str]:
    """Lines that take a flat index apart, the fastest loop last."""
    if len(loops) < 2:
        return []
    assert callable(size)
    lines = []
    for number, loop in enumerate(loops):
        inner = product([other.size for other in loops[number + 1 :]])
        text = source if number + 1 == len(loops) else f"{source} // ({size(inner)})"
        lines.append(f"{loop.name} = {text}" if number == 0 else f"{loop.name} = ({text}) % ({size(loop.size)})")
    return lines

"""Prints a planned region as one C++/OpenMP kernel: rows in parallel, several passes over a row that stays in cache."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agent.proposers.playbook.cpp_functions import needed
from agent.proposers.playbook.nests import (
    Coefficient,
    Loop,
    Nest,
    Plan,
    Tensor,
    constant_names,
    out_names,
    reduced_loops,
    resolve,
    stride_names,
)
from agent.proposers.playbook.sizes import Size, Unsupported, product
from agent.proposers.playbook.values import INTEGERS, TRANSCENDENTAL, Reduction, Value

STORAGE = {
    "float32": "float",
    "bfloat16": "uint16_t",
    "float16": "_Float16",
    "int64": "int64_t",
    "int32": "int32_t",
    "bool": "bool",
}
EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "__builtin_fabsf({0})",
    "reciprocal": "1.0f / {0}",
    "sqrt": "__builtin_sqrtf({0})",
    "rsqrt": "1.0f / __builtin_sqrtf({0})",
    "exp": "exp_({0})",
    "power": "power_({0})",
    "log": "log_({0})",
    "tanh": "tanh_({0})",
    "erf": "erf_({0})",
    "sin": "std::sin({0})",
    "cos": "std::cos({0})",
    "sigmoid": "sigmoid_({0})",
    "silu": "{0} / (1.0f + power_(-{0}))",
    "relu": "{0} < 0.0f ? 0.0f : {0}",
    "pow": "std::pow({0}, {1})",
    "maximum": "maximum_({0}, {1})",
    "minimum": "minimum_({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "not": "!{0}",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
}
USES = {
    "exp": "exp_",
    "silu": "power_",
    "power": "power_",
    "log": "log_",
    "tanh": "tanh_",
    "erf": "erf_",
    "sigmoid": "sigmoid_",
    "maximum": "maximum_",
    "minimum": "maximum_",
}
RUN = 1024  # elements of one vector loop of a sum
COSTLY = TRANSCENDENTAL | {"silu"}
Key = tuple[int, tuple[tuple[int, int], ...]]


@dataclass
class Scope:
    """Lines of one loop body and the values they have computed."""

    lines: list[str] = field(default_factory=list)
    known: dict[Key, str] = field(default_factory=dict)


def literal(value: float, dtype: str) -> str:
    """C source of a number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if dtype in INTEGERS and float(value).is_integer():
        return str(int(value))
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{float(value)!r}f"


class CppPrinter:
    """Prints the body of `extern "C" void kernel(...)` for all nests of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.functions: set[str] = set()

    def kernel(self) -> str:
        """The whole C++ source."""
        bodies = [_NestPrinter(self, nest).text() for nest in self.plan.nests]
        inner = "\n".join(bodies)
        work = " + ".join(_work(nest) for nest in self.plan.nests)
        helpers = needed(self.functions)
        return (
            "#include <cmath>\n#include <cstdint>\n#include <cstring>\n#include <memory>\n\n"
            + (helpers + "\n\n" if helpers else "")
            + f'extern "C" void kernel({", ".join(self.parameters())}) {{\n'
            + f"    #pragma omp parallel if ({work} >= PARALLEL_FROM)\n    {{\n{inner}\n    }}\n}}\n"
        )

    def parameters(self) -> list[str]:
        """C parameters: inputs, outputs, size symbols, strides, constants."""
        plan = self.plan
        pointers = [f"const {STORAGE[t.dtype]}* __restrict__ {t.name}" for t in plan.inputs]
        pointers += [
            f"{STORAGE[t.dtype]}* __restrict__ {name}" for t, name in zip(plan.outputs, out_names(plan), strict=True)
        ]
        numbers = [f"const int64_t {name}" for name in (*plan.symbols, *stride_names(plan))]
        return pointers + numbers + [f"const float {name}" for name in constant_names(plan)]


def _work(nest: Nest) -> str:
    return product([loop.size for loop in (*nest.outer, *nest.row)]).text


class _NestPrinter:
    def __init__(self, parent: CppPrinter, nest: Nest) -> None:
        self.parent, self.plan, self.nest = parent, parent.plan, nest
        self.region = parent.plan.region
        self.row = Scope()
        self.row_leaves = frozenset(leaf for loop in nest.row for leaf in loop.leaves)
        self.inner: list[Scope] = []
        self.taken: set[str] = set()
        self.taken_inside: set[str] = set()
        self.stored: dict[Key, str] = {}
        self.scratch: dict[Key, str] = {}
        self.filled: set[Key] = set()
        self.pointers: dict[str, str] = {}
        self.levels: dict[int, int] = {}

    # --- structure -------------------------------------------------------------------------------------------------

    def text(self) -> str:
        last = max([self.level(r) for r in self.nest.reductions], default=0)
        self._choose_scratch(last)
        for number in range(last + 1):
            self._pass(number)
        self._row_outputs()
        return self._wrapped()

    def level(self, value: Value) -> int:
        """In which pass over the row a value can be computed."""
        known = self.levels.get(id(value))
        if known is None:
            known = max((self.level(argument) for argument in value.args), default=0)
            known += value.op == "reduce" and bool(reduced_loops(self.region, value))
            self.levels[id(value)] = known
        return known

    def _wrapped(self) -> str:
        """The nest's loops around its row body."""
        indent = "        "
        buffers = [
            f"{indent}const std::unique_ptr<float[]> {name}_storage(new float[{self._row_size().text}]);\n"
            f"{indent}float* __restrict__ {name} = {name}_storage.get();"
            for name in dict.fromkeys(self.scratch.values())
        ]
        if not self.nest.outer:
            return "\n".join([*buffers, *_shift(self._flat(), 2)])
        collapse = min(2, len(self.nest.outer))
        suffix = f" collapse({collapse})" if collapse > 1 else ""
        lines = [f"#pragma omp for{suffix} schedule(static) nowait"]
        for number, loop in enumerate(self.nest.outer):
            opened = " {" if number + 1 >= collapse else ""
            lines.append("    " * number + _for(loop) + opened)
        lines += _shift(self.row.lines, len(self.nest.outer))
        lines += ["    " * number + "}" for number in reversed(range(collapse - 1, len(self.nest.outer)))]
        return "\n".join([*buffers, *_shift(lines, 2)])

    def _flat(self) -> list[str]:
        """Without outer loops: one loop that the threads share, or a single row that one of them computes."""
        if self.nest.reductions:
            return ["#pragma omp single nowait", "{", *_shift(self.row.lines, 1), "}"]
        shared = "#pragma omp for simd schedule(static) nowait"
        return [line.replace("#pragma omp simd", shared) for line in self.row.lines]

    def _row_size(self) -> Size:
        return product([loop.size for loop in self.nest.row])

    def _pass(self, number: int) -> None:
        reduces = [r for r in self.nest.reductions if self.level(r) == number + 1]
        outputs = [o for o in self.nest.outputs if self._full(o) and self.level(self.plan.region.outputs[o]) == number]
        if not reduces and not outputs:
            return
        self.taken_inside = set()
        self.inner = [Scope() for _ in self.nest.row]
        accumulators = [item for reduce in reduces for item in self._accumulate(reduce)]
        for index in outputs:
            self._store(index)
        self._close(accumulators)
        for reduce in reduces:
            self._finish(reduce)

    def _full(self, index: int) -> bool:
        loops = self.region.loops(self.region.outputs[index])
        if not loops & self.row_leaves:
            return not self.row_leaves
        if not self.row_leaves <= loops:
            raise Unsupported("an output that varies along a part of the row")
        return True

    def _close(self, accumulators: list[tuple[str, str]]) -> None:
        """Wrap the pass's scopes in their loops and append them to the row body."""
        lines: list[str] = []
        clauses = "".join(f" reduction({kind}:{name})" for kind, name in accumulators)
        sums = [name.removesuffix("_part") for kind, name in accumulators if kind == "+"]
        for number, (loop, scope) in reversed(list(enumerate(zip(self.nest.row, self.inner, strict=True)))):
            lines = [*scope.lines, *lines]
            if number == len(self.nest.row) - 1:
                lines = _short_runs(loop, f"#pragma omp simd{clauses}", lines, sums)
            else:
                lines = [_for(loop) + " {", *_shift(lines, 1), "}"]
        if not self.nest.row:
            raise Unsupported("a region of single elements")
        self.row.lines += lines

    def _statics(self, value: Value, group: Sequence[int] | None = None) -> Iterator[dict[int, int]]:
        leaves = self.region.statics(value) if group is None else tuple(group)
        ranges = [range(self.region.axes.size(leaf).factor) for leaf in leaves]
        for places in itertools.product(*ranges):
            yield dict(zip(leaves, places, strict=True))

    def _unrolled(self, reduce: Value) -> list[int]:
        leaves = self.region.axes.leaves(reduce.payload.group)
        return [leaf for leaf in leaves if self.region.axes.is_static(leaf)]

    # --- reductions ------------------------------------------------------------------------------------------------

    def _accumulate(self, reduce: Value) -> list[tuple[str, str]]:
        used: list[tuple[str, str]] = []
        reduction: Reduction = reduce.payload
        unrolled = self._unrolled(reduce)
        for place in self._statics(reduce):
            name = self._fresh(reduce, place, reduction.kind)
            if reduction.kind == "sum":
                self.row.lines.append(f"double {name}_total = 0.0;")
                used.append(("+", f"{name}_part"))
            else:
                start = {"max": "-INFINITY", "min": "INFINITY"}[reduction.kind]
                self.row.lines.append(f"float {name} = {start};")
                used.append((reduction.kind, name))
            if reduction.kind != "sum" and reduction.exact_nan:
                self.row.lines.append(f"int {name}_nan = 0;")
                used.append(("|", f"{name}_nan"))
            for inner in self._statics(reduce, unrolled):
                term = self.evaluate(reduce.args[0], {**place, **inner})
                self.inner[-1].lines += _combine(reduction, name, term)
            self.row.known[_key(reduce, place)] = name
        return used

    def _finish(self, reduce: Value) -> None:
        reduction: Reduction = reduce.payload
        for place in self._statics(reduce):
            name = self.row.known[_key(reduce, place)]
            if reduction.kind == "sum":
                self.row.lines.append(f"const float {name} = (float){name}_total;")
            elif reduction.exact_nan:
                self.row.lines.append(f"{name} = {name}_nan ? NAN : {name};")

    # --- values ----------------------------------------------------------------------------------------------------

    def evaluate(self, value: Value, coordinates: dict[int, int]) -> str:
        """The C name or literal of a value, emitting what it needs into the right loop."""
        value, place = resolve(self.region, value, coordinates)
        coordinates = {**coordinates, **place}
        if value.op == "literal":
            return literal(value.payload, value.dtype)
        if value.op == "constant":
            return str(value.name)
        if value.op == "size":
            return f"(float)({value.payload.text})" if value.payload.symbols else f"{value.payload.factor}.0f"
        key, scope = _key(value, place), self._scope(value)
        if key in scope.known:
            return scope.known[key]
        expression = self._reload(key) or self._expression(value, place, coordinates)
        name = self._fresh(value, place, inside=scope is not self.row)
        scope.lines.append(f"const {_register(value)} {name} = {expression};")
        scope.known[key] = name
        if key in self.scratch and key not in self.filled and scope is self.inner[-1]:
            scope.lines.append(f"{self._scratch_place(key)} = {name};")
            self.filled.add(key)
        return name

    def _scope(self, value: Value) -> Scope:
        loops = self.region.loops(value)
        for number in reversed(range(len(self.nest.row))):
            if loops & frozenset(self.nest.row[number].leaves):
                return self.inner[number]
        return self.row

    def _reload(self, key: Key) -> str | None:
        if key in self.stored:
            return self.stored[key]
        if key in self.filled:
            return self._scratch_place(key)
        return None

    def _expression(self, value: Value, place: dict[int, int], coordinates: dict[int, int]) -> str:
        if value.op == "load":
            tensor = self.plan.inputs[value.payload]
            return self._from_memory(tensor.dtype, self._address(tensor, tensor.name, place))
        if value.op == "reduce":
            return self._unrolled_reduce(value, place)
        arguments = [self.evaluate(argument, coordinates) for argument in value.args]
        if value.op == "cast":
            return self._cast(value.args[0].dtype, value.dtype, arguments[0])
        if value.op not in EXPRESSIONS:
            raise Unsupported(f"no C++ for {value.op}")
        if value.op in USES:
            self.parent.functions.add(USES[value.op])
        if value.op == "sub" and (rest := self._rest_of_mean(value.args[1], arguments[1], coordinates)):
            return f"({arguments[0]} - {arguments[1]}) - {rest}"
        if value.op == "div" and self._is_total(value):
            arguments[0] += "_total"
        text = EXPRESSIONS[value.op].format(*arguments)
        return text.replace("--", "-(-") + ")" if text.startswith("--") else text

    def _is_total(self, value: Value) -> bool:
        """Whether a value divides a sum over the row, kept in double, by something that holds for the whole row."""
        total = value.args[0]
        summed = total.op == "reduce" and total.payload.kind == "sum" and bool(reduced_loops(self.region, total))
        return summed and self._scope(value) is self.row

    def _rest_of_mean(self, mean: Value, name: str, coordinates: dict[int, int]) -> str | None:
        """What rounding a mean to float32 cut off: half an ulp, as much as a nearly constant row varies."""
        if mean.op != "div" or not self._is_total(mean):
            return None
        rest = f"{name}_rest"
        if rest not in self.taken:
            self.taken.add(rest)
            total, count = (self.evaluate(argument, coordinates) for argument in mean.args)
            exact = f"std::isfinite({name}) ? (float)({total}_total / {count} - {name}) : 0.0f"
            self.row.lines.append(f"const float {rest} = {exact};")
        return rest

    def _unrolled_reduce(self, value: Value, place: dict[int, int]) -> str:
        """A reduction over unrolled axes alone."""
        reduction: Reduction = value.payload
        terms = [
            self.evaluate(value.args[0], {**place, **inner})
            for inner in self._statics(value, self.region.axes.leaves(reduction.group))
        ]
        if reduction.kind == "sum":
            return " + ".join(terms)
        self.parent.functions.add("maximum_")
        text = terms[0]
        for term in terms[1:]:
            text = f"{'maximum_' if reduction.kind == 'max' else 'minimum_'}({text}, {term})"
        return text

    def _cast(self, source: str, wanted: str, text: str) -> str:
        if wanted == "bool":
            return f"{text} != 0"
        if wanted in INTEGERS:
            return f"({STORAGE[wanted]}){text}"
        if source in (*INTEGERS, "bool"):
            text = f"(float){text}"
        if wanted == "bfloat16":
            self.parent.functions.add("bf16")
            return f"from_bf16(to_bf16({text}))"
        return f"(float)(_Float16)({text})" if wanted == "float16" else text

    # --- memory ----------------------------------------------------------------------------------------------------

    def _store(self, index: int) -> None:
        value, tensor = self.region.outputs[index], self.plan.outputs[index]
        for place in self._statics(value):
            text = self.evaluate(value, place)
            address = self._address(tensor, out_names(self.plan)[index], place)
            stored = f"to_bf16({text})" if tensor.dtype == "bfloat16" else f"({STORAGE[tensor.dtype]}){text}"
            if tensor.dtype == "bfloat16":
                self.parent.functions.add("bf16")
            scope = self.inner[-1] if self.nest.row else self.row
            scope.lines.append(f"{address} = {text if tensor.dtype == 'float32' else stored};")
            real, at = resolve(self.region, value, place)
            self.stored.setdefault(_key(real, at), self._from_memory(tensor.dtype, address))

    def _row_outputs(self) -> None:
        for index in self.nest.outputs:
            if self._full(index):
                continue
            value, tensor = self.region.outputs[index], self.plan.outputs[index]
            for place in self._statics(value):
                text = self.evaluate(value, place)
                if tensor.dtype == "bfloat16":
                    self.parent.functions.add("bf16")
                    text = f"to_bf16({text})"
                elif tensor.dtype != "float32":
                    text = f"({STORAGE[tensor.dtype]}){text}"
                self.row.lines.append(f"{self._address(tensor, out_names(self.plan)[index], place)} = {text};")

    def _from_memory(self, dtype: str, address: str) -> str:
        if dtype == "bfloat16":
            self.parent.functions.add("bf16")
            return f"from_bf16({address})"
        return f"(float){address}" if dtype == "float16" else address

    def _address(self, tensor: Tensor, name: str, place: dict[int, int]) -> str:
        """`x_row[j + 32]`: a pointer to the row, made once, and an index inside it."""
        fixed = sum(
            (
                tensor.coefficients[leaf].size.factor * at
                for leaf, at in place.items()
                if not _symbolic(tensor.coefficients[leaf])
            ),
            0,
        )
        moving = [
            f"{at} * {tensor.coefficients[leaf].text}"
            for leaf, at in place.items()
            if at and _symbolic(tensor.coefficients[leaf])
        ]
        inside = [_step(loop, tensor) for loop in self.nest.row]
        index = " + ".join([part for part in inside if part] + moving + ([str(fixed)] if fixed else []))
        return f"{self._row_pointer(tensor, name)}[{index or 0}]"

    def _row_pointer(self, tensor: Tensor, name: str) -> str:
        if name in self.pointers:
            return self.pointers[name]
        steps = [part for part in (_step(loop, tensor) for loop in self.nest.outer) if part]
        if not steps:
            self.pointers[name] = name
            return name
        constness = "" if name in out_names(self.plan) else "const "
        self.row.lines.insert(
            0, f"{constness}{STORAGE[tensor.dtype]}* __restrict__ {name}_row = {name} + {' + '.join(steps)};"
        )
        self.pointers[name] = f"{name}_row"
        return self.pointers[name]

    # --- scratch ---------------------------------------------------------------------------------------------------

    def _choose_scratch(self, last: int) -> None:
        """Costly values that two passes need are kept in a row buffer by the first."""
        demanded: list[dict[Key, Value]] = [self._demand(number) for number in range(last + 1)]
        for number in range(1, last + 1):
            for key, value in demanded[number].items():
                earlier = any(key in demanded[before] for before in range(number))
                if earlier and self._costly(value, set()) and key not in self.scratch:
                    self.scratch[key] = f"kept{len(self.scratch)}"
        self._drop_inner_scratch(demanded)

    def _demand(self, number: int) -> dict[Key, Value]:
        found: dict[Key, Value] = {}
        for reduce in self.nest.reductions:
            if self.level(reduce) == number + 1:
                unrolled = self._unrolled(reduce)
                for place in self._statics(reduce):
                    for inner in self._statics(reduce, unrolled):
                        self._collect(reduce.args[0], {**place, **inner}, found)
        for index in self.nest.outputs:
            value = self.region.outputs[index]
            if self._full(index) and self.level(value) == number:
                for place in self._statics(value):
                    self._collect(value, place, found)
        return found

    def _collect(self, value: Value, coordinates: dict[int, int], found: dict[Key, Value]) -> None:
        value, place = resolve(self.region, value, coordinates)
        key = _key(value, place)
        if key in found or not self.region.loops(value) & self.row_leaves or value.op == "reduce":
            return
        found[key] = value
        for argument in value.args:
            self._collect(argument, {**coordinates, **place}, found)

    def _costly(self, value: Value, seen: set[int]) -> bool:
        if id(value) in seen or value.op == "reduce" or not self.region.loops(value) & self.row_leaves:
            return False
        seen.add(id(value))
        return value.op in COSTLY or any(self._costly(argument, seen) for argument in value.args)

    def _drop_inner_scratch(self, demanded: list[dict[Key, Value]]) -> None:
        """Keep only values that nothing else kept already covers: the last costly ones before the later pass."""
        values = {key: value for found in demanded for key, value in found.items()}
        covered: set[int] = set()
        for key in self.scratch:
            for argument in values[key].args:
                covered |= self._below(argument)
        self.scratch = {key: name for key, name in self.scratch.items() if key[0] not in covered}
        for number, key in enumerate(self.scratch):
            self.scratch[key] = f"kept{number}"

    def _below(self, value: Value) -> set[int]:
        found = {id(value)}
        for argument in value.args:
            found |= self._below(argument)
        return found

    def _scratch_place(self, key: Key) -> str:
        index = ""
        for loop in self.nest.row:
            index = loop.name if not index else f"({index}) * {loop.size.text} + {loop.name}"
        return f"{self.scratch[key]}[{index}]"

    # --- names -----------------------------------------------------------------------------------------------------

    def _fresh(self, value: Value, place: dict[int, int], hint: str = "", *, inside: bool = False) -> str:
        """A C name after the graph's own; names inside a pass may come again in the next."""
        base = value.name or hint or value.op
        if value.op == "load" and inside:
            base = f"{base}_{self.nest.row[-1].name}"
        base = re.sub(r"\W", "_", base) + "".join(f"_{at}" for at in place.values())
        reserved = {t.name for t in self.plan.inputs} | set(self.plan.symbols) | set(constant_names(self.plan))
        reserved |= set(out_names(self.plan)) | set(stride_names(self.plan)) | RESERVED
        reserved |= self.taken | self.taken_inside
        name, number = base, 1
        while name in reserved or name.endswith("_"):
            number += 1
            name = f"{base.rstrip('_')}_{number}"
        (self.taken_inside if inside else self.taken).add(name)
        return name


WORDS = """
float int bool double long short char void if else for while do switch case default return const static inline
auto register union struct class new delete this template typename namespace using try catch throw true false
and or not xor exp log pow sin cos tanh erf abs sqrt max min kernel j k0 k1 k2 i0 i1 i2 i3 std as_float as_bits
signed unsigned operator public private protected virtual friend goto break continue sizeof volatile enum
INFINITY NAN NULL asm export extern from to
"""
RESERVED = frozenset(WORDS.split())


def _register(value: Value) -> str:
    if value.dtype == "bool":
        return "bool"
    return STORAGE[value.dtype] if value.dtype in INTEGERS else "float"


def _key(value: Value, place: dict[int, int]) -> Key:
    return id(value), tuple(sorted(place.items()))


def _for(loop: Loop) -> str:
    return f"for (int64_t {loop.name} = 0; {loop.name} < {loop.size.text}; ++{loop.name})"


def _short_runs(loop: Loop, pragma: str, body: Sequence[str], sums: Sequence[str]) -> list[str]:
    """The innermost loop of a pass; sums run in double, RUN elements to a vector loop, then join."""
    if not sums:
        return [pragma, _for(loop) + " {", *_shift(body, 1), "}"]
    size, name = loop.size.text, loop.name
    starts = [f"double {total}_part = 0.0;" for total in sums]
    ends = [f"{total}_total += {total}_part;" for total in sums]
    if (loop.size.constant or RUN + 1) <= RUN:
        return [*starts, pragma, _for(loop) + " {", *_shift(body, 1), "}", *ends]
    run = [
        f"const int64_t to = from + {RUN} < {size} ? from + {RUN} : {size};",
        *starts,
        pragma,
        f"for (int64_t {name} = from; {name} < to; ++{name}) {{",
        *_shift(body, 1),
        "}",
        *ends,
    ]
    return [f"for (int64_t from = 0; from < {size}; from += {RUN}) {{", *_shift(run, 1), "}"]


def _shift(lines: Sequence[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _symbolic(coefficient: Coefficient) -> bool:
    return bool(coefficient.stride or coefficient.size.symbols)


def _step(loop: Loop, tensor: Tensor) -> str:
    coefficient = tensor.coefficients.get(loop.leaves[-1])
    if coefficient is None:
        return ""
    if coefficient == Coefficient(Size(1)):
        return loop.name
    return f"{loop.name} * {coefficient.text}"


def _combine(reduction: Reduction, name: str, term: str) -> list[str]:
    if reduction.kind == "sum":
        return [f"{name}_part += {term};"]
    sign = ">" if reduction.kind == "max" else "<"
    lines = [f"{name} = {term} {sign} {name} ? {term} : {name};"]
    return [*lines, f"{name}_nan |= {term} != {term};"] if reduction.exact_nan else lines

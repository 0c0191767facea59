"""Compiles a model with Inductor so that every statement of the generated code can be timed and traced to its origin.

Inductor writes the names of the captured graph's nodes above each kernel call ("Source Nodes: [...]"). We add a mark
before and after each call as the wrapper is written to disk, and on the CPU, where Inductor leaves the comment out, the
comment too. Touches private parts of torch (`PyCodeCache.write`, `CppScheduling.define_kernel`); where they are not as
expected, MeasurementError is raised and the caller falls back.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from harness.errors import OursError

SOURCE_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
BOOKKEEPING = frozenset(
    {
        "assert_size_stride",
        "assert_alignment",
        "empty_strided",
        "empty_strided_cpu",
        "empty_strided_cpu_pinned",
        "empty_strided_cuda",
        "empty_strided_xpu",
        "empty_strided_mtia",
        "empty_strided_p2p",
        "reinterpret_tensor",
        "alloc_from_pool",
        "get_raw_stream",
        "args",
        "getattr",
        "print",
        "len",
        "run_intermediate_hooks",
    }
)
FUNCTIONS = re.compile(r"call$|partition_\d+$")
IMPORT = "from harness.marks import mark as _overnight_mark\n"


class MeasurementError(OursError):
    """Inductor's generated code is not as expected; times are then taken another way."""


@dataclass(frozen=True)
class Statement:
    """One kernel call in generated code: its text, the graph it comes from, the node names written above it."""

    number: int
    graph: int
    text: str
    names: tuple[str, ...]


@dataclass
class Instrumented:
    """A compiled model, and the statements that its code marks."""

    call: Callable[..., Any]
    statements: list[Statement] = field(default_factory=list)
    graphs: list[tuple[str, ...]] = field(default_factory=list)  # node names per compiled graph
    current: int = -1

    def require_statements(self) -> None:
        """Raise MeasurementError when the generated code was not seen or names no origins."""
        if not any(statement.names for statement in self.statements):
            raise MeasurementError(
                f"{len(self.statements)} statements of generated code were seen, none with the names of its origins"
            )


def compile_instrumented(model: Callable[..., Any], options: Mapping[str, Any]) -> Instrumented:
    """A compiled callable; compilation happens at its first call, which must be made inside `instrumenting(...)`."""
    from torch._inductor.compile_fx import compile_fx

    made = Instrumented(model)

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        made.graphs.append(tuple(node.name for node in module.graph.nodes))
        made.current = len(made.graphs) - 1
        return compile_fx(module, list(example_inputs), config_patches=dict(options))

    made.call = torch.compile(model, backend=backend, dynamic=False)
    return made


@contextmanager
def instrumenting(made: Instrumented) -> Iterator[None]:
    """While inside, code that Inductor writes is instrumented for `made`."""
    import torch._inductor.config as inductor
    from torch._inductor.codecache import PyCodeCache

    original = PyCodeCache.__dict__.get("write")
    if original is None:
        raise MeasurementError("this torch writes its generated code in another way")
    plain = PyCodeCache.write

    def write(_cls: type, source_code: str, extra: str = "") -> Any:
        return plain(_instrumented_source(source_code, made), extra)

    PyCodeCache.write = classmethod(write)  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings(), inductor.patch(force_disable_caches=True), _commented_cpp():
            warnings.simplefilter("ignore")
            yield
    finally:
        PyCodeCache.write = original  # type: ignore[method-assign]


@contextmanager
def _commented_cpp() -> Iterator[None]:
    """On the CPU, write the source nodes above the call as Inductor does on a GPU."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.utils import get_kernel_metadata
    from torch._inductor.virtualized import V

    plain: Any = CppScheduling.define_kernel

    def define_kernel(self: Any, src_code: str, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        name = plain(self, src_code, nodes, *args, **kwargs)
        wrapper = V.graph.wrapper_code
        wrapper.writeline(get_kernel_metadata(nodes, wrapper)[0])
        return name

    CppScheduling.define_kernel = define_kernel  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppScheduling.define_kernel = plain  # type: ignore[method-assign]


def _instrumented_source(source: str, made: Instrumented) -> str:
    """The wrapper with marks; any other generated module as it is."""
    if "def call(" not in source or "async_compile" not in source:
        return source
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    before: dict[int, str] = {}
    after: dict[int, str] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and FUNCTIONS.match(function.name):
            for node in _launches(function):
                statement = _statement(node, lines, made)
                made.statements.append(statement)
                indent = " " * node.col_offset
                before[node.lineno] = f"{indent}_overnight_mark({statement.number})\n"
                after[node.end_lineno or node.lineno] = f"{indent}_overnight_mark(-1)\n"
    parts = [IMPORT]
    for number, line in enumerate(lines, start=1):
        parts.extend((before.get(number, ""), line, after.get(number, "")))
    return "".join(parts)


def _launches(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The statements of generated code that run kernels or operators."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            root = name.split(".")[0]
            if root in BOOKKEEPING or name.startswith(("torch.cuda.", "torch._C.")) or name.endswith(".clear"):
                continue
            if FUNCTIONS.match(name.split(".")[-1]) or name == "torch.empty_strided":
                continue
            yield node


def _statement(node: ast.stmt, lines: Sequence[str], made: Instrumented) -> Statement:
    names: tuple[str, ...] = ()
    row = node.lineno - 2
    while row >= 0 and not names:
        text = lines[row].strip()
        found = SOURCE_NODES.search(text) if text.startswith("#") else None
        if found:
            names = tuple(name.strip() for name in found.group(1).split(",") if name.strip())
        elif not _is_bookkeeping(text):
            break
        row -= 1
    number = len(made.statements)
    return Statement(number, made.current, lines[node.lineno - 1].strip(), names)


def _is_bookkeeping(text: str) -> bool:
    """Whether a line between a comment and its call only prepares it: an allocation, a check, a stream, a rename."""
    if not text or text.startswith(("#", "del ", "stream", "raw_stream", "_overnight_mark")):
        return True
    value = re.split(r"[;#]", text.split(" = ", 1)[-1], maxsplit=1)[0].strip()
    return value.isidentifier() or re.split(r"[.(]", value, maxsplit=1)[0] in BOOKKEEPING

"""The Python texts made of a KernelBench problem: its reference, and a kernel file around a `ModelNew`. Pure."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.module_call import GIVEN

MODULE_CALL = Path(__file__).with_name("module_call.py")
CANDIDATE_CLASSES = ("ModelNew", "Model")

_REFERENCE = """
sys.modules["overnight_problem"] = types.ModuleType("overnight_problem")
_SPACE = sys.modules["overnight_problem"].__dict__
exec(compile({source!r}, {path!r}, "exec"), _SPACE)
_SPACE.update({sizes!r})
_call = ModuleCall(cast(built(_SPACE["Model"], _SPACE["get_init_inputs"]()), torch.{dtype}), {places!r}, {arguments!r})


def reference({parameters}):
    return _call({parameters})
"""

_CANDIDATE = """

# How this file is called: its {name} as a function of its inputs and of the original's weights.
def _overnight_kernel():
    space = {{"__name__": "overnight_module_call"}}
    exec(compile({module_call!r}, "module_call.py", "exec"), space)
    model = space["cast"](space["built"]({name}, {init}), {dtype})
    places, order = space["matched"](model, {wanted!r})
    call = space["ModuleCall"](model, places, {arguments!r}, order)
    moved = []

    def kernel_fn({parameters}):
        if not moved:
            model.to({first}.device)
            moved.append(True)
        return call({parameters})

    return kernel_fn


kernel_fn = _overnight_kernel()
"""


@dataclass(frozen=True)
class ProblemText:
    """What the texts need of a problem: its source, the sizes put in its place, and the order of a call's tensors."""

    path: str
    source: str
    sizes: Mapping[str, int]
    dtype: str
    arguments: tuple[Any, ...]  # GIVEN or the plain value of each forward argument
    parameters: tuple[str, ...]  # names of inputs, then weights, as a kernel gets them
    wanted: tuple[tuple[str, tuple[int, ...]], ...]  # dotted name and shape of each weight
    init: Any

    def reference(self) -> str:
        """Python text that defines `reference(inputs..., weights...)` and runs alone."""
        head = "import sys\nimport types\n\n" + MODULE_CALL.read_text(encoding="utf-8")
        body = _REFERENCE.format(
            source=self.source,
            path=self.path,
            sizes=dict(self.sizes),
            dtype=self.dtype,
            places=tuple(name for name, _ in self.wanted),
            arguments=self.arguments,
            parameters=", ".join(self.parameters),
        )
        return head + body

    def kernel(self, source: str) -> str:
        """A candidate as a kernel file: as it is when it has a `kernel_fn`, else its module called as one.

        Raises InputError for a module that cannot be built without the problem's own code.
        """
        name = module_class(source)
        if name is None:
            return source
        return source + _CANDIDATE.format(
            name=name,
            module_call=MODULE_CALL.read_text(encoding="utf-8"),
            init=self._init(source),
            dtype=f"__import__('torch').{self.dtype}",
            wanted=self.wanted,
            arguments=self.arguments,
            parameters=", ".join(self.parameters),
            first=self.parameters[0],
        )

    def _init(self, source: str) -> str:
        """The arguments of the constructor, as text."""
        try:
            if ast.literal_eval(repr(self.init)) == self.init:
                return repr(self.init)
        except (ValueError, SyntaxError):
            pass
        if "get_init_inputs" in defined(source):
            return "get_init_inputs()"
        raise InputError(
            f"{self.path}: get_init_inputs() gives more than plain values, so a ModelNew file must define its own"
        )


def defined(source: str) -> frozenset[str]:
    """Names of the functions, classes and variables at the top level of a file; nothing for what is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def module_class(source: str) -> str | None:
    """The class that a candidate answers with, or None when it has a `kernel_fn` (or neither: statics says so)."""
    names = defined(source)
    if "kernel_fn" in names:
        return None
    return next((name for name in CANDIDATE_CLASSES if name in names), None)


def arguments_of(values: Sequence[Any], tensor: type) -> tuple[Any, ...]:
    """The forward arguments with every tensor replaced by GIVEN; raises ValueError for what is no plain value."""
    found: list[Any] = []
    for index, value in enumerate(values):
        if isinstance(value, tensor):
            found.append(GIVEN)
        elif isinstance(value, bool | int | float | str | None):
            found.append(value)
        else:
            raise ValueError(f"input {index} is a {type(value).__name__}, neither a tensor nor a plain value")
    return tuple(found)

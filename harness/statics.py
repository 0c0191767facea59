"""What a kernel file says without being run: its syntax, signature, literals, imports and library calls.

Reads text only. Does not protect against code that hides what it does (exec, getattr): whatever such code can reach
is a worker's private copy, and the dynamic guards judge its answers.
"""

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from harness.problem import FLOATS
from harness.records import SHORT_DTYPES

ENTRY = "kernel_fn"
FORBIDDEN_IMPORTS = ("harness", "agent", "overnight")
GLOBAL_SWITCHES = frozenset(
    {
        "set_num_threads", "set_num_interop_threads", "set_default_dtype", "set_default_device",
        "use_deterministic_algorithms", "set_float32_matmul_precision", "set_flush_denormal", "manual_seed",
    }
)  # fmt: skip
FAST_MATH_FLAGS = ("-ffast-math", "-Ofast", "--use_fast_math", "-use_fast_math", "-funsafe-math-optimizations")
PATCHABLE = frozenset({"torch", "time", "triton", "builtins", "sys", "os", "gc", "math"})
HARMLESS_TORCH = frozenset(
    {
        "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like",
        "Tensor",
        "device", "Size", "Stream", "Event", "stream", "current_stream", "synchronize", "is_available", "dtype",
        "get_device_properties", "current_device", "no_grad", "inference_mode", "get_device_capability", "finfo",
        "iinfo",
        "get_num_threads", "as_strided",
        "promote_types", "result_type", "can_cast", "is_floating_point",
        "is_tensor", "CUDAGraph", "graph", "load_inline", "tensor", "broadcast_shapes",
    }
)  # fmt: skip
ARRAY_LIBRARIES = frozenset({"numpy", "scipy", "cupy", "jax", "cv2", "pandas"})
WORKING_METHODS = frozenset(
    {
        "softmax", "log_softmax", "sum", "mean", "var", "std", "norm", "matmul", "mm", "bmm", "addmm", "exp", "log",
        "rsqrt",
        "sqrt", "pow", "square", "mul", "add", "sub", "div", "gather", "logsumexp", "sigmoid", "relu", "tanh", "cumsum",
        "amax", "amin", "max", "min", "mul_", "add_", "sub_", "div_", "exp_", "dot", "mv", "baddbmm", "scatter",
        "index_select",
    }
)  # fmt: skip


@dataclass(frozen=True)
class StaticRefusal:
    """Why a file is refused unread by any worker; `guard` is set where it is not merely broken."""

    detail: str
    guard: str | None = None


@dataclass(frozen=True)
class KernelFile:
    """The parsed file. `dtypes` is None when it declares none; `library` names the library calls it makes."""

    parameters: tuple[str, ...]
    accepts_any_keyword: bool
    max_positional: int | None
    dtypes: tuple[str, ...] | None
    error_bound: float | None
    tunables: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    library: tuple[str, ...] = ()


def read_kernel(source: str, *, arguments: int, keywords: tuple[str, ...]) -> KernelFile | StaticRefusal:
    """Parse and check a kernel file that will get `arguments` tensors and these keyword constants."""
    try:
        tree = ast.parse(source)
        compile(source, "<kernel>", "exec")
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return StaticRefusal(f"the file is not valid Python: {reason}{line}")
    except (RecursionError, MemoryError):
        return StaticRefusal("the file is nested too deeply to be parsed")
    refusal = _forbidden(tree)
    if refusal is not None:
        return refusal
    return _described(tree, arguments, keywords)


def read_module(source: str) -> KernelFile | StaticRefusal:
    """Parse and check a file that answers with a module (`ModelNew`) instead of a `kernel_fn`."""
    try:
        tree = ast.parse(source)
        compile(source, "<kernel>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return StaticRefusal(f"the file is not valid Python: {error}")
    refusal = _forbidden(tree)
    if refusal is not None:
        return refusal
    return KernelFile((), True, None, None, None, {}, _module_calls(tree))  # noqa: FBT003


def _module_calls(tree: ast.Module) -> tuple[str, ...]:
    """Library calls of a module file: layers made in `__init__` only hold weights, unless something calls them."""
    found = dict.fromkeys(_library_calls(_without_init(tree)))
    layers = {
        target.attr: name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Attribute) and (name := _dotted(node.value.func, _imported(tree)))
        if name.startswith("torch.nn.") and name != "torch.nn.Parameter"
    }
    for node in ast.walk(_without_init(tree)):
        used = node.func if isinstance(node, ast.Call) else node.iter if isinstance(node, ast.For) else None
        while isinstance(used, ast.Subscript):
            used = used.value
        if isinstance(used, ast.Attribute) and used.attr in layers:
            found[layers[used.attr]] = None
    return tuple(found)


def _without_init(tree: ast.Module) -> ast.Module:
    """The file without constructors and without what only KernelBench's runner calls."""
    aside = {"__init__", "get_inputs", "get_init_inputs"}

    def kept(body: list[ast.stmt]) -> list[ast.stmt]:
        return [node for node in body if not (isinstance(node, ast.FunctionDef) and node.name in aside)]

    classes = {
        id(node): ast.ClassDef(node.name, node.bases, node.keywords, kept(node.body), node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return ast.Module([classes.get(id(node), node) for node in kept(tree.body)], [])


def _forbidden(tree: ast.Module) -> StaticRefusal | None:
    aliases = _imported(tree)
    for name in aliases.values():
        if name.split(".")[0] in FORBIDDEN_IMPORTS:
            return StaticRefusal(f"the file imports {name}, which belongs to the judge", "forbidden_import")
    for node in ast.walk(tree):
        for target in _assigned(node):
            path = _dotted(target, aliases)
            if path and path.split(".")[0] in PATCHABLE and "." in path:
                return StaticRefusal(f"the file assigns to {path}, which the whole process shares", "patched_library")
        if isinstance(node, ast.Call):
            path = _dotted(node.func, aliases) or ""
            if path.startswith("torch.") and path.rsplit(".", 1)[-1] in GLOBAL_SWITCHES:
                return StaticRefusal(f"the file calls {path}, which changes the whole process", "global_state")
            first = _dotted(node.args[0], aliases) if node.args else None
            if path == "setattr" and first and first.split(".")[0] in PATCHABLE:
                return StaticRefusal(f"the file patches {first} with setattr", "patched_library")
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = next((flag for flag in FAST_MATH_FLAGS for text in strings if flag in text.split()), None)
    if found in {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"}:
        return StaticRefusal(f"{found} makes the whole process flush denormals; leave it out", "fast_math")
    return None


def _described(tree: ast.Module, arguments: int, keywords: tuple[str, ...]) -> KernelFile | StaticRefusal:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == ENTRY]
    bound = ENTRY in {name for node in tree.body for name in _bound_names(node)}
    if not functions and not bound:
        return StaticRefusal(f"the file defines no function {ENTRY}")
    try:
        dtypes, error_bound, tunables = _literals(tree)
    except ValueError as error:
        return StaticRefusal(str(error))
    if not functions:
        return KernelFile((), True, None, dtypes, error_bound, tunables, _library_calls(tree))  # noqa: FBT003
    given = functions[-1].args
    positional = [*given.posonlyargs, *given.args]
    maximum = None if given.vararg else len(positional)
    required = len(positional) - len(given.defaults)
    named = tuple(argument.arg for argument in (*positional, *given.kwonlyargs))
    if maximum is not None and maximum < arguments:
        return StaticRefusal(f"{ENTRY} takes {maximum} arguments, the target has {arguments} inputs")
    missing = [name for name in keywords if name not in named and given.kwarg is None]
    if missing:
        return StaticRefusal(f"{ENTRY} does not take the constant {missing[0]!r} of the target")
    unfilled = [argument.arg for argument in positional[arguments:required] if argument.arg not in keywords]
    if unfilled:
        return StaticRefusal(f"{ENTRY} requires {unfilled[0]!r}, which the target does not pass")
    return KernelFile(named, given.kwarg is not None, maximum, dtypes, error_bound, tunables, _library_calls(tree))


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.If | ast.Try | ast.With):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield child.name
            elif isinstance(child, ast.stmt):
                yield from _bound_names(child)


def _literals(
    tree: ast.Module,
) -> tuple[tuple[str, ...] | None, float | None, Mapping[str, tuple[object, ...]]]:
    """DTYPES, ERROR_BOUND and TUNABLES; raises ValueError with the sentence to show."""
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in {"DTYPES", "ERROR_BOUND", "TUNABLES"}:
                found[name] = _literal(name, node.value)
    dtypes = _dtypes(found["DTYPES"]) if "DTYPES" in found else None
    bound = found.get("ERROR_BOUND")
    if isinstance(bound, bool) or not isinstance(bound, int | float | None):
        raise ValueError("ERROR_BOUND must be a number")
    if bound is not None and not 0 < bound < math.inf:
        raise ValueError("ERROR_BOUND must be finite and above 0")
    tunables = found.get("TUNABLES", {})
    if not isinstance(tunables, dict) or not all(isinstance(value, list | tuple) for value in tunables.values()):
        raise ValueError("TUNABLES must map names to lists of values")
    return (
        dtypes,
        None if bound is None else float(bound),
        {str(name): tuple(value) for name, value in tunables.items()},
    )


def _literal(name: str, value: ast.expr) -> object:
    """A Python literal; in DTYPES torch.float16 and the like are read as their names."""
    if name == "DTYPES" and isinstance(value, ast.List | ast.Tuple | ast.Set):
        return [item.attr if isinstance(item, ast.Attribute) else ast.literal_eval(item) for item in value.elts]
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"{name} must be a literal") from None


def _dtypes(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set) or not items:
        raise ValueError("DTYPES must list floating dtypes")
    plain = [str(item).removeprefix("torch.") for item in items]
    names = tuple(SHORT_DTYPES.get(name, name) for name in plain)
    if bad := [name for name in names if name not in FLOATS]:
        raise ValueError(f"DTYPES names {bad[0]!r}, which is no floating dtype")
    return names


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local name to the module path it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [item for item in node.targets if isinstance(item, ast.Attribute)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
        return [node.target]
    return []


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id if node.id == "setattr" else None)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    return None


def _library_calls(tree: ast.Module) -> tuple[str, ...]:
    """Calls outside jitted functions that let torch do the arithmetic, by name."""
    aliases = _imported(tree)
    found: dict[str, None] = {}
    for node in _host_nodes(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found["@"] = None
        if not isinstance(node, ast.Call):
            continue
        path = _dotted(node.func, aliases)
        last = path.rsplit(".", 1)[-1] if path else ""
        top = path.split(".")[0] if path else ""
        if path and (top in ARRAY_LIBRARIES or (top == "torch" and last not in HARMLESS_TORCH)):
            found[path] = None
        elif path is None and isinstance(node.func, ast.Attribute) and node.func.attr in WORKING_METHODS:
            found[f".{node.func.attr}"] = None
    return tuple(found)


def _host_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except the bodies of functions decorated with something called jit."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and any("jit" in ast.unparse(item) for item in child.decorator_list):
            continue
        yield child
        yield from _host_nodes(child)

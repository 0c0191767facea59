"""The command line: every command parses, calls one verb and maps its answer to an exit code.

Exit 0 yes, 1 the honest no, 2 the user's input, 3 the environment or ourselves. Nothing heavy is imported before a
command needs it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import OvernightError

if TYPE_CHECKING:
    from rich.console import Console

    from agent.verbs import Harness

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Makes a PyTorch model faster while you sleep: profile, propose, judge, keep or revert.",
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="FILE.py:CLASS, package.module:CLASS or a checkpoint folder.")
]
Weights = Annotated[str | None, typer.Option(help="A .pt or .safetensors file to load into the model.")]
ModelArgs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Argument of the class; repeatable.")]
Inputs = Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Function that makes the inputs.")]
InputShape = Annotated[list[str] | None, typer.Option(metavar="1,512", help="One per required parameter; repeatable.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default cuda where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on standard output.")]
SessionOption = Annotated[str | None, typer.Option("--session", help="A session's name; default the latest.")]
SessionArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A session's name; default the latest.")]


def main() -> None:
    """Entry of the `overnight` command: failures become one sentence and their exit code."""
    try:
        app()
    except OvernightError as error:
        print(f"overnight: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("overnight: stopped.", file=sys.stderr)
        raise SystemExit(3) from None


@app.command()
def profile(
    model: ModelArgument,
    *,
    weights: Weights = None,
    model_args: ModelArgs = None,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Profile a model and rank what could be replaced by Amdahl's law."""
    from agent.json_reports import profile_json
    from agent.model_spec import model_spec
    from agent.tables import print_ranking
    from agent.verbs import scratch_folder

    spec = model_spec(
        model,
        weights=weights,
        model_args=model_args or (),
        inputs=inputs,
        input_shapes=input_shape or (),
        device=device,
        dtype=dtype,
    )
    with scratch_folder() as folder:
        report = _harness(folder).profile(spec, folder)
    if as_json:
        _print_json(profile_json(report))
    else:
        print_ranking(_console(), report)


@app.command()
def check(
    *,
    target: Annotated[str, typer.Option(help="A named op (softmax, rmsnorm, ...) or a target of a session.")],
    kernel: Annotated[Path, typer.Option(help="The kernel file to judge.")],
    device: Device = None,
    dtype: Dtype = None,
    shape: Annotated[str | None, typer.Option(metavar="M=512,N=1024", help="Narrows a named op's sizes.")] = None,
    must_win: Annotated[bool, typer.Option("--must-win", help="Exit 0 only for a keep.")] = False,
    session: SessionOption = None,
    incumbent: Annotated[Path | None, typer.Option(help="A kernel file it has to beat instead of PyTorch.")] = None,
    library_calls: Annotated[str | None, typer.Option(help="allow or forbid; default overnight.yaml's.")] = None,
    bench: Annotated[bool, typer.Option("--bench/--no-bench", help="Time it after the five stages.")] = True,
    as_json: Json = False,
) -> None:
    """Judge one kernel file: five stages, then the benchmark."""
    from agent.json_reports import verdict_json
    from agent.tables import print_verdict
    from agent.verbs import scratch_folder
    from harness.records import Status

    request = _judge_request(target, kernel, device, dtype, shape, session, incumbent, library_calls, bench=bench)
    with scratch_folder() as folder:
        verdict = _harness(folder).judge_once(request)
    if as_json:
        _print_json(verdict_json(verdict))
    else:
        print_verdict(_console(), verdict)
    if verdict.status is Status.ENVIRONMENT:
        raise typer.Exit(3)
    won = verdict.status is Status.KEEP if must_win else verdict.accepted
    raise typer.Exit(0 if won else 1)


def _judge_request(
    target: str,
    kernel: Path,
    device: str | None,
    dtype: str | None,
    shape: str | None,
    session: str | None,
    incumbent: Path | None,
    library_calls: str | None,
    *,
    bench: bool,
) -> Any:
    from agent.config import load_config
    from agent.machine import default_device
    from agent.model_spec import checked_device, checked_dtype, sizes
    from agent.places import find_target
    from agent.repository import workspace_root
    from harness.records import JudgeRequest, LibraryPolicy

    root = workspace_root(Path.cwd())
    policy = _choice(LibraryPolicy, library_calls, "--library-calls") or load_config(root).library_calls
    return JudgeRequest(
        target=find_target(root, target, session),
        source=_read_kernel(kernel, "--kernel"),
        incumbent=_read_kernel(incumbent, "--incumbent") if incumbent else None,
        device=checked_device(device) or default_device(),
        dtype=checked_dtype(dtype),
        shape=sizes(shape) if shape else {},
        library_calls=policy,
        bench=bench,
    )


def _read_kernel(path: Path, what: str) -> str:
    from agent.errors import InputError

    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(f"{what}: there is no file {path}.") from error
    except (PermissionError, UnicodeDecodeError) as error:
        raise InputError(f"{what}: {path} cannot be read as text: {error}.") from error


def _choice(kind: Any, value: str | None, what: str) -> Any:
    from agent.errors import InputError

    if value is None:
        return None
    if value not in set(kind):
        raise InputError(f"{what} {value} is not known: use {' or '.join(kind)}.")
    return kind(value)


def _harness(folder: Path) -> "Harness":
    from agent.repository import workspace_root
    from agent.stopping import StopFlag
    from agent.verbs import Harness

    stop = StopFlag()
    stop.listen(detached=False)
    return Harness(workspace_root(Path.cwd()), folder / "harness.log", stop, _say_event)


def _say_event(name: str, body: Mapping[str, Any]) -> None:
    """Progress of a harness process, on standard error so that `--json` stays alone on standard output."""
    if sys.stderr.isatty():
        words = " ".join(str(value) for value in body.values())
        print(f"  {name} {words}"[:160], file=sys.stderr)


def _console() -> "Console":
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140, color_system=None)


def _print_json(data: object) -> None:
    from agent.places import pretty

    print(pretty(data))

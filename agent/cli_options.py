"""Options that several commands share, and how they print."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from agent.verbs import Harness
    from harness.records import ModelSpec

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="FILE.py:CLASS, package.module:CLASS or a checkpoint folder.")
]
Weights = Annotated[str | None, typer.Option(help="A .pt or .safetensors file to load into the model.")]
ModelArgs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Argument of the class; repeatable.")]
Inputs = Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Function that makes the inputs.")]
InputShape = Annotated[list[str] | None, typer.Option(metavar="1,512", help="One per required parameter; repeatable.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default cuda where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Trust = Annotated[
    list[str] | None, typer.Option(metavar="code|pickle", help="Run a checkpoint's own Python, or a .pt file's pickle.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on standard output.")]
SessionOption = Annotated[str | None, typer.Option("--session", help="A session's name; default the latest.")]
SessionArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A session's name; default the latest.")]


def spec_of(
    model: str,
    weights: str | None,
    model_args: list[str] | None,
    inputs: str | None,
    input_shape: list[str] | None,
    device: str | None,
    dtype: str | None,
    trust: list[str] | None = None,
) -> "ModelSpec":
    """MODEL and its flags as a record."""
    from agent.model_spec import model_spec

    return model_spec(
        model,
        weights=weights,
        model_args=model_args or (),
        inputs=inputs,
        input_shapes=input_shape or (),
        device=device,
        dtype=dtype,
        trust=trust or (),
    )


def harness_in(folder: Path) -> "Harness":
    """Harness processes for one command, logging into `folder`; a signal ends them."""
    from agent.repository import workspace_root
    from agent.stopping import StopFlag
    from agent.verbs import Harness

    stop = StopFlag()
    stop.listen(detached=False)
    return Harness(workspace_root(Path.cwd()), folder / "harness.log", stop, _say_event)


def _say_event(name: str, body: Mapping[str, Any]) -> None:
    """Progress of a harness process, on standard error so that `--json` stays alone on standard output."""
    if sys.stderr.isatty():
        from agent.progress import event_words

        print(f"  {event_words(name, body)}"[:160], file=sys.stderr)


def console() -> "Console":
    """Standard output; plain and wide when nobody is looking."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140, color_system=None)


def print_json(data: object) -> None:
    """One JSON document on standard output."""
    from agent.places import pretty

    print(pretty(data))

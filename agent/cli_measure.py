"""`profile` and `check`: commands that measure without a session."""

from pathlib import Path
from typing import Annotated, Any

import typer

from agent.cli_options import (
    Device,
    Dtype,
    Inputs,
    InputShape,
    Json,
    ModelArgs,
    ModelArgument,
    SessionOption,
    Trust,
    Weights,
    console,
    harness_in,
    print_json,
    spec_of,
)

KERNEL_LIMIT_BYTES = 1 << 20


def profile(
    model: ModelArgument,
    *,
    weights: Weights = None,
    model_args: ModelArgs = None,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Profile a model and rank what could be replaced by Amdahl's law."""
    from agent.json_reports import profile_json
    from agent.tables import print_ranking
    from agent.verbs import scratch_folder

    spec = spec_of(model, weights, model_args, inputs, input_shape, device, dtype, trust)
    with scratch_folder() as folder:
        report = harness_in(folder).profile(spec, folder)
    if as_json:
        print_json(profile_json(report))
    else:
        print_ranking(console(), report)


def check(
    *,
    target: Annotated[str, typer.Option(help="A named op (softmax), a target of a session, a KernelBench file.")],
    kernel: Annotated[Path, typer.Option(help="The kernel file to judge.")],
    device: Device = None,
    dtype: Dtype = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="M=512,N=1024", help="Narrows a named op's sizes, or a KernelBench file's."),
    ] = None,
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
        verdict = harness_in(folder).judge_once(request)
    refuse_without_device(verdict)
    if as_json:
        print_json(verdict_json(verdict))
    else:
        print_verdict(console(), verdict)
    if verdict.status is Status.ENVIRONMENT:
        raise typer.Exit(3)
    won = verdict.status is Status.KEEP if must_win else verdict.accepted
    raise typer.Exit(0 if won else 1)


def refuse_without_device(verdict: Any) -> None:
    """A device that this machine does not have was the user's choice, not a fault of the machine's."""
    from agent.errors import InputError

    if verdict.guard == "no_device":
        raise InputError(f"--device: {verdict.detail}.")


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
    policy = choice(LibraryPolicy, library_calls, "--library-calls") or load_config(root).library_calls
    return JudgeRequest(
        target=find_target(root, target, session),
        source=read_kernel(kernel, "--kernel"),
        incumbent=read_kernel(incumbent, "--incumbent") if incumbent else None,
        device=checked_device(device) or default_device(),
        dtype=checked_dtype(dtype),
        shape={} if shape is None else sizes(shape),
        library_calls=policy,
        bench=bench,
    )


def read_kernel(path: Path, what: str) -> str:
    """A kernel file's text, line endings and all; raises InputError naming the flag and the file."""
    from agent.errors import InputError

    try:
        if path.stat().st_size > KERNEL_LIMIT_BYTES:
            raise InputError(f"{what}: {path} is larger than {KERNEL_LIMIT_BYTES >> 20} MiB: no kernel file is.")
        return path.read_bytes().decode("utf-8")  # not read_text: line endings are part of what is judged
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{what}: there is no file {path}.") from error
    except PermissionError as error:
        raise InputError(f"{what}: {path} may not be read by you: change its permissions.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{what}: {path} is not UTF-8 text ({error}): save it as UTF-8.") from error


def choice(kind: Any, value: str | None, what: str) -> Any:
    """A closed choice from a flag, None when not given; raises InputError listing what there is."""
    from agent.errors import InputError

    if value is None:
        return None
    if value not in set(kind):
        raise InputError(f"{what} {value} is not known: use {' or '.join(kind)}.")
    return kind(value)

"""`run`, `resume`, `stop` and `verify`: commands that work on a session."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli_options import (
    Device,
    Dtype,
    Inputs,
    InputShape,
    Json,
    ModelArgs,
    ModelArgument,
    SessionArgument,
    Trust,
    Weights,
    console,
    harness_in,
    print_json,
    spec_of,
)

if TYPE_CHECKING:
    from agent.places import SessionPlaces
    from agent.progress import Progress
    from agent.records import Command
    from agent.session import Options, Show

STOP_PATIENCE_S = 30.0
FINISH_PATIENCE_S = 1800.0  # the longest that one experiment may take

Hours = Annotated[str | None, typer.Option(help="Active hours over all resumes; +2 adds two.")]
Experiments = Annotated[str | None, typer.Option(help="Experiments over all resumes; +10 adds ten.")]
Dollars = Annotated[str | None, typer.Option(help="Dollars for language models.")]
Tokens = Annotated[str | None, typer.Option(help="Tokens of language models.")]
Calls = Annotated[str | None, typer.Option(help="Calls of language models.")]
ProposerOption = Annotated[str | None, typer.Option("--proposer", help="playbook, llm, command or replay:DIR.")]
LlmModel = Annotated[list[str] | None, typer.Option("--llm", help="A language model, PROVIDER/MODEL; repeatable.")]
ApiBase = Annotated[str | None, typer.Option("--api-base", help="URL of an OpenAI-compatible server for --llm.")]
ApiKeyEnv = Annotated[str | None, typer.Option("--api-key-env", help="Variable that holds the key for --llm.")]
CommandOption = Annotated[str | None, typer.Option("--command", help="The program of --proposer command.")]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background; see status, logs, stop.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings instead of overnight.yaml.")]


def run(
    model: ModelArgument,
    *,
    name: Annotated[str | None, typer.Option(help="The session's name; default the model's, then -2, -3.")] = None,
    hours: Hours = None,
    experiments: Experiments = None,
    dollars: Dollars = None,
    tokens: Tokens = None,
    calls: Calls = None,
    proposer: ProposerOption = None,
    command: CommandOption = None,
    llm: LlmModel = None,
    api_base: ApiBase = None,
    api_key_env: ApiKeyEnv = None,
    library_calls: Annotated[str | None, typer.Option(help="allow or forbid.")] = None,
    config: ConfigFile = None,
    detach: Detach = False,
    weights: Weights = None,
    model_args: ModelArgs = None,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    device: Device = None,
    dtype: Dtype = None,
    trust: Trust = None,
) -> None:
    """Profile a model, then propose, judge and keep kernels until the budget is used; verify the model at the end."""
    from agent import llm_settings, runner
    from agent.cli_measure import choice
    from agent.config import load_config
    from agent.machine import default_device
    from agent.opening import create
    from agent.places import SessionPlaces
    from agent.repository import workspace_root
    from agent.session import Options
    from harness.records import LibraryPolicy

    root = workspace_root(Path.cwd())
    settings = load_config(root, config)
    asked = llm_settings.LlmFlags(tuple(llm or ()), api_base, api_key_env)
    runner.check_settings(settings)
    runner.check_compiler()
    spec = spec_of(model, weights, model_args, inputs, input_shape, device, dtype, trust)
    spec = replace(spec, device=spec.device or default_device())
    options = Options(
        model=spec,
        device=spec.device or "cpu",
        proposer=runner.absolute_proposer(llm_settings.proposer_name(proposer, settings.proposer, asked)),
        library_calls=choice(LibraryPolicy, library_calls, "--library-calls") or settings.library_calls,
        budget=runner.first_budget(settings, _flags(hours, experiments, dollars, tokens, calls)),
        command=_command(command, tuple(settings.command.argv), settings.command.timeout_s),
        llm=llm_settings.amended(llm_settings.from_config(settings.llm), asked),
        executor=settings.executor,
        devices=tuple(settings.devices),
        config=str(config.resolve()) if config else "",
        flags=_given(
            _flags(hours, experiments, dollars, tokens, calls), command=command, llm=llm[0] if llm else api_base
        ),
    )
    options.places()  # refused before anything is written
    runner.make_proposer(options)  # refused before anything is written
    places = SessionPlaces(root, _name(root, name, spec))
    create(root, places.name, options)
    _go(places, detach=detach)


def resume(
    name: SessionArgument = None,
    *,
    hours: Hours = None,
    experiments: Experiments = None,
    dollars: Dollars = None,
    tokens: Tokens = None,
    calls: Calls = None,
    proposer: ProposerOption = None,
    command: CommandOption = None,
    llm: LlmModel = None,
    api_base: ApiBase = None,
    api_key_env: ApiKeyEnv = None,
    accept_change: Annotated[bool, typer.Option("--accept-change", help="Go on with a changed model.")] = False,
    detach: Detach = False,
    in_background: Annotated[bool, typer.Option("--in-background", hidden=True)] = False,
) -> None:
    """Go on with a session where it stopped or was cut off."""
    from agent import llm_settings, runner
    from agent.budget import amended
    from agent.places import find_session
    from agent.progress import Progress
    from agent.repository import workspace_root

    runner.check_compiler()
    places = find_session(workspace_root(Path.cwd()), name)
    if _was_paused(places):
        print(f"session {places.name} goes on after its pause")
        return
    flags = _flags(hours, experiments, dollars, tokens, calls)
    models = llm_settings.LlmFlags(tuple(llm or ()), api_base, api_key_env)

    def change(options: "Options") -> "Options":
        chosen = runner.absolute_proposer(llm_settings.proposer_name(proposer, options.proposer, models))
        asked = _command(command, options.command.argv, options.command.timeout_s)
        given = (*options.flags, *_given(flags, command=command, llm=llm[0] if llm else api_base))
        return replace(
            options,
            budget=amended(options.budget, flags),
            proposer=chosen,
            command=asked,
            llm=llm_settings.amended(options.llm, models),
            flags=tuple(sorted(set(given))),
        )

    if detach:
        again = [word for key, value in flags.items() if value is not None for word in (f"--{key}", value)]
        again += ["--proposer", runner.absolute_proposer(proposer)] if proposer else []
        again += (["--command", command] if command else []) + models.words()
        _detached(places, again + ["--accept-change"] * accept_change)
    with Progress() as progress:
        code = runner.run_session(
            places, show=_shown(progress), detached=in_background, change=change, accept_change=accept_change
        )
    raise typer.Exit(code)


def stop(
    name: SessionArgument = None,
    *,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the experiment that runs: cut it off.")] = False,
) -> None:
    """Stop a running session cleanly after the experiment it is at, or at once; it can be resumed."""
    import os
    import signal

    from agent.errors import MachineError
    from agent.lock import running
    from agent.places import find_session
    from agent.report import status_of
    from agent.repository import workspace_root
    from agent.steering import steer

    places = find_session(workspace_root(Path.cwd()), name)
    holder = running(places.lock)
    if holder is None:
        print(f"session {places.name} is not running")
        raise typer.Exit(1)
    steer(places, lambda wish: replace(wish, stopping=True))
    number = None if now else status_of(places).open_experiment
    if number is None:
        os.kill(holder.pid, signal.SIGTERM)
    else:
        print(
            f"session {places.name} finishes experiment {number} first; `overnight stop --now` cuts it off", flush=True
        )
    deadline = time.monotonic() + (STOP_PATIENCE_S if number is None else FINISH_PATIENCE_S)
    while running(places.lock) == holder:
        if time.monotonic() > deadline:
            waited = STOP_PATIENCE_S if number is None else FINISH_PATIENCE_S
            raise MachineError(f"Session {places.name} (pid {holder.pid}) has not stopped in {waited:.0f} s.")
        time.sleep(0.1)
    print(f"session {places.name} has stopped; go on with `overnight resume {places.name}`")


def verify(
    name: SessionArgument = None,
    *,
    mode: Annotated[list[str] | None, typer.Option(help="A mode to measure; repeatable; default all.")] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the kernel that breaks or slows the model.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the whole model with the kept kernels against eager, CUDA graph, compile and max-autotune."""
    from agent.errors import InputError
    from agent.json_reports import VERIFY_MODES, verify_json
    from agent.measuring import verify_session
    from agent.places import find_session, write_whole
    from agent.repository import workspace_root
    from agent.tables import print_verify
    from agent.verbs import scratch_folder
    from harness import wire

    unknown = sorted(set(mode or ()) - set(VERIFY_MODES))
    if unknown:
        raise InputError(f"--mode {unknown[0]} is not known: use {', '.join(VERIFY_MODES)}.")
    places = find_session(workspace_root(Path.cwd()), name)
    with scratch_folder() as folder:
        modes = tuple(dict.fromkeys(["overnight", "eager", *mode])) if mode else VERIFY_MODES
        result = verify_session(harness_in(folder), places, modes, bisect=bisect)
    if modes == VERIFY_MODES:
        write_whole(places.verified, wire.to_json(result))  # what report and dashboard show
    if as_json:
        print_json(verify_json(result))
    else:
        print_verify(console(), result)
    raise typer.Exit(0 if result.outputs_ok and result.faster else 1)


def _go(places: "SessionPlaces", *, detach: bool) -> None:
    from agent import runner
    from agent.progress import Progress

    if detach:
        _detached(places, [])
    with Progress() as progress:
        code = runner.run_session(places, show=_shown(progress), detached=False)
    raise typer.Exit(code)


def _detached(places: "SessionPlaces", arguments: list[str]) -> None:
    from agent import runner

    pid = runner.detach(places, arguments)
    print(f"session {places.name} runs in the background (pid {pid}): overnight status, logs or stop {places.name}")
    raise typer.Exit(0)


def _name(root: Path, wanted: str | None, spec: object) -> str:
    import re

    from agent.errors import InputError
    from agent.model_spec import session_name
    from agent.places import next_free_name
    from agent.repository import session_branches
    from harness.records import ModelSpec

    assert isinstance(spec, ModelSpec)
    if wanted is None:
        return next_free_name(root, session_name(spec), session_branches(root))
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]*", wanted):
        raise InputError(f"--name {wanted} must be made of letters, digits, - and _.")
    return wanted


def _command(text: str | None, argv: tuple[str, ...], timeout_s: float) -> "Command":
    import shlex

    from agent.errors import InputError
    from agent.records import Command

    try:
        return Command(argv if text is None else tuple(shlex.split(text)), timeout_s)
    except ValueError as error:
        raise InputError(f"--command {text} cannot be split into words ({error}): close its quotes.") from error


def _flags(
    hours: str | None, experiments: str | None, dollars: str | None, tokens: str | None, calls: str | None
) -> dict[str, str | None]:
    return {"hours": hours, "experiments": experiments, "dollars": dollars, "tokens": tokens, "calls": calls}


def _given(flags: dict[str, str | None], **others: str | None) -> tuple[str, ...]:
    """The names of the flags that were given: they win over overnight.yaml, also over what is edited later."""
    return tuple(sorted(name for name, value in {**flags, **others}.items() if value is not None))


def _was_paused(places: "SessionPlaces") -> bool:
    """Let a running session that the user has paused go on; returns whether it was one."""
    from agent.lock import running
    from agent.steering import steer, steering

    if not (running(places.lock) and steering(places).paused):
        return False
    steer(places, lambda wish: replace(wish, paused=False))
    return True


def _shown(progress: "Progress") -> "Show":
    from agent.session import Show
    from agent.tables import print_ranking, print_verify

    return Show(
        say=progress.say,
        event=progress.event,
        ranking=lambda report: print_ranking(progress.console, report),
        verification=lambda report: print_verify(progress.console, report),
    )

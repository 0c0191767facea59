"""`pause`, `skip`, `pin` and `try`: steering a session while it runs, or before it is resumed."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli_options import Json, SessionArgument, SessionOption, print_json

if TYPE_CHECKING:
    from agent.places import SessionPlaces
    from agent.records import Experiment

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="A target of the session.")]
Off = Annotated[bool, typer.Option("--off", help="Take it back.")]
POLL_S = 0.3


def pause(
    name: SessionArgument = None,
    *,
    off: Annotated[bool, typer.Option("--off", help="Go on, as `overnight resume` does.")] = False,
) -> None:
    """Let a running session rest after the experiment it is at: its judge ends, its time does not count."""
    from agent.lock import running
    from agent.steering import steer

    places = _session(name)
    if not running(places.lock):
        print(f"session {places.name} is not running: there is nothing to pause")
        raise typer.Exit(1)
    steer(places, lambda wish: replace(wish, paused=not off))
    if off:
        print(f"session {places.name} goes on")
    else:
        print(f"session {places.name} rests after this experiment; go on with `overnight resume {places.name}`")


def skip(target: TargetArgument, *, session: SessionOption = None, off: Off = False) -> None:
    """Work no longer on one target, from the next experiment on."""
    from agent.steering import steer

    places = _with_target(target, session)
    steer(
        places,
        lambda wish: replace(
            wish,
            skipped=tuple(one for one in wish.skipped if one != target) + (() if off else (target,)),
            pinned=None if wish.pinned == target else wish.pinned,
        ),
    )
    print(f"{target} is {'worked on again' if off else 'left alone'} from the next experiment of {places.name} on")


def pin(target: TargetArgument, *, session: SessionOption = None, off: Off = False) -> None:
    """Work on one target alone, from the next experiment on, until it is done."""
    from agent.steering import steer

    places = _with_target(target, session)
    steer(
        places,
        lambda wish: replace(
            wish,
            pinned=None if off else target,
            skipped=tuple(one for one in wish.skipped if off or one != target),
        ),
    )
    words = "all targets are worked on" if off else f"{target} alone is worked on"
    print(f"{words} from the next experiment of {places.name} on")


def try_kernel(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A kernel file of yours.")],
    *,
    target: Annotated[str, typer.Option(help="The target of the session that it is for.")],
    session: SessionOption = None,
    backend: Annotated[
        str | None, typer.Option(help="triton, cuda, cpp or library; default read off the file.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="What results.tsv says about it.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its verdict; exit 0 only when accepted.")] = False,
    as_json: Json = False,
) -> None:
    """Hand a kernel of yours to a session: judged next, as an experiment like any other (proposer `try`)."""
    from agent.cli_measure import read_kernel
    from agent.lock import running
    from agent.proposers.replies import backend_of
    from agent.steering import hand_in

    places = _with_target(target, session)
    source = read_kernel(file, "FILE")
    _check(file, source, backend)
    name = hand_in(places, target, backend or backend_of(source), source, description or f"{file.name} by hand")
    if running(places.lock):
        if wait:
            raise typer.Exit(_waited(places, name, as_json=as_json))
        said = "judged after the experiment that runs"
    else:
        said = f"judged first when you `overnight resume {places.name}`"
        if _budget_is_used(places):
            said += " --experiments +1 (its budget is used up)"
    if as_json:
        print_json({"session": places.name, "target": target, "name": name, "running": bool(running(places.lock))})
    else:
        print(f"{file} is handed in as {name} for {target}: {said}")


def _session(name: str | None) -> "SessionPlaces":
    from agent.places import find_session
    from agent.repository import workspace_root

    return find_session(workspace_root(Path.cwd()), name)


def _with_target(target: str, session: str | None) -> "SessionPlaces":
    """The session, when it has that target; raises InputError listing those it has."""
    from agent.errors import InputError

    places = _session(session)
    profile = places.read_profile()
    known = [one.id for one in profile.targets] if profile else []
    if target not in known:
        has = f"it has {', '.join(known)}" if known else "it has none yet, wait for its profile"
        raise InputError(f"{target} is not a target of session {places.name}: {has}.")
    return places


def _check(file: Path, source: str, backend: str | None) -> None:
    """Refuse before it costs an experiment what can be no kernel file at all."""
    import ast

    from agent.errors import InputError
    from harness.records import BACKENDS

    if backend is not None and backend not in BACKENDS:
        raise InputError(f"--backend {backend} is not known: use {', '.join(BACKENDS)}.")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{file} does not parse as Python ({error}): mend it first.") from error
    names = {getattr(node, "name", "") for node in tree.body}
    names |= {name.id for node in tree.body for name in ast.walk(node) if isinstance(name, ast.Name)}
    if "kernel_fn" not in names:
        raise InputError(f"{file} defines no kernel_fn: a kernel file must (docs/kernels.md).")


def _budget_is_used(places: "SessionPlaces") -> bool:
    from agent.budget import exhausted
    from agent.report import status_of

    state = status_of(places)
    return exhausted(state.budget, state.spent) is not None


def _waited(places: "SessionPlaces", name: str, *, as_json: bool) -> int:
    import time

    from agent.errors import MachineError
    from agent.lock import running

    while (one := _experiment(places, name)) is None:
        if not running(places.lock) and _experiment(places, name) is None:
            raise MachineError(
                f"Session {places.name} ended before it judged {name}: it is judged first when you"
                f" `overnight resume {places.name}`."
            )
        time.sleep(POLL_S)
    from agent.experiment import headline
    from agent.json_reports import verdict_json

    if as_json:
        print_json({"experiment": one.number, "verdict": verdict_json(one.verdict) if one.verdict else None})
    else:
        print(headline(one))
    return 0 if one.verdict and one.verdict.accepted else 1


def _experiment(places: "SessionPlaces", name: str) -> "Experiment | None":
    """The recorded experiment that judged it; one that was cut off is judged again under the next number."""
    from contextlib import closing

    from agent.journal import Journal
    from agent.records import ExperimentState, RowStatus

    with closing(Journal(places.journal, read_only=True)) as journal:
        mine = [one for one in journal.experiments() if one.candidate and one.candidate.tactic == name]
    done = [one for one in mine if one.state is ExperimentState.RECORDED and one.status is not RowStatus.INTERRUPTED]
    return done[-1] if done else None

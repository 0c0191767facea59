"""`init`, `doctor` and the readers: `status`, `logs`, `results`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli_options import Json, SessionArgument, console, harness_in, print_json

if TYPE_CHECKING:
    from agent.steering import Steering

SETTINGS = """\
# Settings of Overnight; flags win over them. Every line is optional.
# proposer: playbook
# library_calls: allow      # or forbid: kernels must do the work themselves
# budget: {hours: 8}
# notify: ["ntfys://${NTFY_TOKEN}@ntfy.sh/my-topic", "command:./tell-me.sh"]   # Apprise, or JSON on standard input
"""


def init(
    *,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Also make a user unit that resumes sessions of this workspace.")
    ] = False,
) -> None:
    """Make the few files that Overnight reads here: program.md, overnight.yaml, results.tsv."""
    from agent.harness_client import PACKAGE_ROOT
    from agent.repository import checkout_root
    from agent.results import HEADER

    root = checkout_root(Path.cwd())
    guidance = PACKAGE_ROOT / "program.md"
    contents = {
        "program.md": guidance.read_text(encoding="utf-8") if guidance.exists() else "# Guidance for proposers\n",
        "overnight.yaml": SETTINGS,
        "results.tsv": HEADER + "\n",
    }
    for name, text in contents.items():
        exists = (root / name).exists()
        if not exists:
            (root / name).write_text(text, encoding="utf-8")
        print(f"{name}: {'is there already' if exists else 'made'}")
    if systemd:
        from agent.unit import unit_advice, write_unit

        path, changed = write_unit(root)
        print(f"{path}: {'made' if changed else 'is there already'}")
        print("\n".join(unit_advice(root)))


def doctor(*, as_json: Json = False) -> None:
    """Say what this machine offers: versions, compilers, devices, and which sandbox layers are active."""
    from agent.doctor import examine
    from agent.verbs import scratch_folder

    with scratch_folder() as folder:
        findings = examine(harness_in(folder))
    if as_json:
        print_json(findings)
        return
    for name, value in findings.items():
        words = ", ".join(value) if isinstance(value, list) else str(value)
        console().print(f"{name:<16} {words or 'none'}", highlight=False, markup=False)


def status(name: SessionArgument = None, *, as_json: Json = False) -> None:
    """Say how a session stands."""
    from agent.places import find_session
    from agent.report import status_of
    from agent.repository import workspace_root
    from agent.steering import steering, waiting
    from harness import wire

    places = find_session(workspace_root(Path.cwd()), name)
    state, wish, handed_in = status_of(places), steering(places), len(waiting(places))
    if state.pid is None:  # both end with the process
        wish = replace(wish, paused=False, stopping=False)
    if as_json:
        print_json({**state.data(), **wire.to_data(wish), "handed_in": handed_in})
        return
    print("\n".join([*state.lines(), *_wishes(wish, handed_in)]))


def _wishes(wish: "Steering", handed_in: int) -> list[str]:
    """What the user has asked of the session."""
    said = {
        "paused: go on with `overnight resume`": wish.paused,
        "stopping after this experiment": wish.stopping,
        f"pinned: {wish.pinned}": wish.pinned is not None,
        f"skipped: {', '.join(wish.skipped)}": bool(wish.skipped),
        f"handed in and not judged yet: {handed_in}": bool(handed_in),
    }
    return [line for line, holds in said.items() if holds]


def logs(
    name: SessionArgument = None,
    *,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the session ends.")] = False,
) -> None:
    """Print what a session and its harness processes wrote."""
    import time

    from agent.lock import running
    from agent.places import find_session
    from agent.repository import workspace_root
    from agent.visible import visible

    places = find_session(workspace_root(Path.cwd()), name)
    places.log.touch()
    with places.log.open(encoding="utf-8", errors="replace") as log:
        sys.stdout.writelines(map(visible, log.readlines()[-lines:]))
        while follow:
            ended = running(places.lock) is None
            sys.stdout.writelines(map(visible, log.readlines()))
            sys.stdout.flush()
            if ended:  # asked before the last look, so that nothing is missed
                break
            time.sleep(0.5)


def results(
    name: SessionArgument = None,
    *,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Remake results.tsv from the journals.")] = False,
    as_json: Json = False,
) -> None:
    """Print the morning file, of one session or all of them."""
    from agent import results as file
    from agent.places import SessionPlaces, find_session, sessions
    from agent.report import rows_of
    from agent.repository import workspace_root
    from agent.tables import print_results

    root = workspace_root(Path.cwd())
    path = root / "results.tsv"
    if rebuild:
        known = sessions(root)
        rows = [row for one in known for row in rows_of(SessionPlaces(root, one))]
        file.rebuild(path, rows, known)
        print(f"{path}: {len(rows)} rows from {len(known)} sessions", file=sys.stderr)
    chosen = [row for row in file.read(path) if name is None or row["session"] == name]
    if name is not None and not chosen:
        find_session(root, name)  # a session without a row yet is fine, an unknown one is refused
    if as_json:
        print_json(chosen)
    else:
        print_results(console(), chosen)

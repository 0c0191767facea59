"""`report` and `dashboard`: what a session has achieved, to read afterwards or live."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from agent.cli_options import Json, SessionArgument, print_json

DEFAULT_PORT = 8642


def report(name: SessionArgument = None, *, as_json: Json = False) -> None:
    """Write report.md, progress.png and report.html of a session below `.overnight/NAME/` and print the first one."""
    from agent.morning.markdown import markdown
    from agent.morning.night import read_night
    from agent.morning.writing import report_json, write_report
    from agent.places import find_session
    from agent.repository import workspace_root

    places = find_session(workspace_root(Path.cwd()), name)
    night = read_night(places)
    files = write_report(night, places.folder)
    if as_json:
        print_json(report_json(night, files))
        return
    print(markdown(night))
    print(f"overnight: open {files.page} in a browser; {files.picture.name} is beside it", file=sys.stderr)


def dashboard(
    *,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = DEFAULT_PORT,
    as_json: Json = False,
) -> None:
    """Show all sessions live in a browser, read-only, until Ctrl-C; its address is printed."""
    import os

    from agent.dashboard.access import is_local
    from agent.dashboard.service import TOKEN_VARIABLE, bind, check_extra, serve
    from agent.dashboard.shelf import Shelf
    from agent.places import find_session
    from agent.repository import workspace_root

    root = workspace_root(Path.cwd())
    find_session(root, None)
    check_extra()
    bound = bind(host, port, os.environ.get(TOKEN_VARIABLE) or None)

    def ready() -> None:
        if as_json:
            print_json({"address": bound.address, "pid": os.getpid()})
        else:
            print(f"the dashboard of {root}: {bound.address} (Ctrl-C ends it)")
        if not is_local(host):
            print(
                "overnight: it can be reached from other machines, unencrypted, by whoever has this address with its"
                " token; an SSH tunnel to 127.0.0.1 is safer",
                file=sys.stderr,
            )
        sys.stdout.flush()

    serve(Shelf(root), bound, ready)

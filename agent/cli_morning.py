"""`report` and `dashboard`: what a session has achieved, to read afterwards or live."""

import sys
from pathlib import Path

from agent.cli_options import Json, SessionArgument, print_json


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

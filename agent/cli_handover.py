"""`apply` and `export`: what a session found, in the user's hands."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli_options import Json, SessionArgument, print_json

if TYPE_CHECKING:
    from agent.places import SessionPlaces
    from agent.user_branch import Applied, KeptCommit


def apply(
    name: SessionArgument = None,
    *,
    branch: Annotated[
        str | None, typer.Option(help="The branch that gets the kept commits; default a new one, NAME-kernels.")
    ] = None,
    checkout: Annotated[
        bool, typer.Option("--checkout", help="The branch is checked out here: let my files follow.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put the kept commits of a session on a branch of yours; refuses on conflict, never forces."""
    from agent.places import find_session
    from agent.repository import commit_switches, workspace_root
    from agent.user_branch import apply_commits, default_branch

    root = workspace_root(Path.cwd())
    places = find_session(root, name)
    keeps = _kept_commits(places)
    if not keeps:
        print_json({"session": places.name, "branch": None, "commits": []}) if as_json else print(
            f"session {places.name} has kept nothing: there is nothing to apply"
        )
        raise typer.Exit(1)
    done = apply_commits(root, default_branch(places.name) if branch is None else branch, keeps, checkout=checkout)
    if as_json:
        print_json(_applied_data(places.name, done))
        return
    for line in _applied_lines(done, commit_switches(root)):
        print(line)


def _kept_commits(places: "SessionPlaces") -> "tuple[KeptCommit, ...]":
    from agent.journal import Journal
    from agent.records import RowStatus
    from agent.session import still_valid
    from agent.user_branch import KeptCommit

    with closing(Journal(places.journal, read_only=True)) as journal:
        standing = {one.target for one in still_valid(journal) if one.status is RowStatus.KEEP}
        kept = [one for one in journal.experiments() if one.status is RowStatus.KEEP and one.target in standing]
    return tuple(KeptCommit(one.number, one.target, one.commit or "") for one in kept)


def _applied_data(session: str, done: "Applied") -> dict[str, object]:
    return {
        "session": session,
        "branch": done.branch,
        "created": done.created,
        "tip": done.tip,
        "commits": [{"experiment": one.experiment, "target": one.target, "from": one.commit} for one in done.picked],
        "already_there": [one.experiment for one in done.present],
        "checkout_updated": done.checkout_updated,
    }


def _applied_lines(done: "Applied", switches: list[str]) -> list[str]:
    if not done.picked:
        return [f"{done.branch} has all {len(done.present)} kept commits already"]
    made = " (a new branch at your HEAD)" if done.created else ""
    lines = [f"{done.branch}{made}: {len(done.picked)} kept commits added, tip {done.tip[:12]}"]
    lines += [f"  experiment {one.experiment}: {one.target}" for one in done.picked]
    if switches:
        lines.append(f"{' and '.join(switches)} are bypassed, so the bytes are those that were judged")
    if not done.checkout_updated:
        lines.append(f"your checkout is as it was; look at it with `git diff HEAD...{done.branch}`")
    return lines

"""`apply` and `export`: what a session found, in the user's hands."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.cli_options import Json, SessionArgument, print_json

if TYPE_CHECKING:
    from agent.places import SessionPlaces
    from agent.user_branch import Applied, KeptCommit


FORMATS = ("package", "hf-kernels", "dataset")
SessionsOption = Annotated[list[str] | None, typer.Option("--session", help="A session's name; default the latest.")]


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


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    *,
    session: SessionsOption = None,
    form: Annotated[str, typer.Option("--format", help="package, hf-kernels or dataset.")] = "package",
    licence: Annotated[
        str | None, typer.Option("--license", help="Under which licence you publish it, such as apache-2.0.")
    ] = None,
    prompts: Annotated[bool, typer.Option("--prompts", help="A dataset with prompts and replies too.")] = False,
    every: Annotated[bool, typer.Option("--all", help="A dataset of all sessions here.")] = False,
    as_json: Json = False,
) -> None:
    """Write the kept kernels as a package that needs torch and Triton alone or for the Hub, or experiments as data."""
    from agent.errors import InputError

    if form not in FORMATS:
        raise InputError(f"--format {form} is not known: use {', '.join(FORMATS)}.")
    if form != "dataset" and (prompts or every or len(session or ()) > 1):
        raise InputError("--prompts, --all and several --session are for --format dataset.")
    if form == "package" and licence is not None:
        raise InputError("--license is for what is published: --format hf-kernels or dataset.")
    publish = _dataset if form == "dataset" else _package
    said = publish(folder, session, form, licence, prompts=prompts, every=every)
    if as_json:
        print_json(said)
    else:
        print("\n".join(said["lines"]))
    raise typer.Exit(0 if said["written"] else 1)


def _package(
    folder: Path, sessions: list[str] | None, form: str, licence: str | None, *, prompts: bool, every: bool
) -> dict[str, Any]:
    del prompts, every  # refused above
    from agent import package
    from agent.cli_options import harness_in
    from agent.places import find_session
    from agent.repository import workspace_root
    from agent.verbs import scratch_folder

    places = find_session(workspace_root(Path.cwd()), sessions[0] if sessions else None)
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow a link that the user gave
    chosen = _licence(licence, "the Hub") if form == "hf-kernels" else ""
    package.check_place(folder)
    with scratch_folder() as scratch:
        material = package.gather(places, harness_in(scratch))
    if not material.kernels:
        return _said(places.name, folder, 0, [f"session {places.name} has kept nothing: there is nothing to export"])
    if form == "hf-kernels":
        package.place(folder, lambda inside: package.write_hub_project(material, inside, folder.name, chosen))
        how = f"load it with kernels.get_local_kernel(Path({str(folder)!r})); CARD.md says more"
    else:
        package.place(folder, lambda inside: package.write_package_with_readme(material, inside, folder.name))
        how = f"use it: import {folder.name} with {folder.parent} on sys.path, then {folder.name}.optimize(model)"
        if not folder.name.isidentifier():
            how = f"{folder.name} is no name that Python can import: rename the folder to use it"
    count = len(material.kernels)
    return _said(places.name, folder, count, [f"{folder}: {count} kernel{'s' * (count > 1)}", how])


def _said(session: str, folder: Path, count: int, lines: list[str]) -> dict[str, Any]:
    return {"session": session, "folder": str(folder), "written": count, "lines": lines}


def _licence(given: str | None, where: str) -> str:
    """The user's choice; asked for where somebody can answer."""
    import re

    from agent.errors import InputError

    if given is None and sys.stdin.isatty():
        given = typer.prompt("Licence (an identifier of the Hub, such as apache-2.0 or mit)")
    if not given:
        raise InputError(f"--license is needed for {where}: choose one, such as --license apache-2.0 or mit.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", given):
        raise InputError(f"--license {given} is no licence identifier, such as apache-2.0 or mit.")
    return given


def _dataset(
    folder: Path, sessions: list[str] | None, form: str, licence: str | None, *, prompts: bool, every: bool
) -> dict[str, Any]:
    from agent import dataset, package
    from agent.places import SessionPlaces, find_session
    from agent.places import sessions as sessions_of
    from agent.redaction import own_folders, redactor
    from agent.repository import workspace_root

    root = workspace_root(Path.cwd())
    latest = find_session(root, None)
    names = sessions_of(root) if every else list(dict.fromkeys(sessions or [latest.name]))
    places = [find_session(root, name) for name in names]
    chosen = _licence(licence, form)
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow a link that the user gave
    package.check_place(folder)
    dataset.check_pyarrow()
    clean = redactor(os.environ, own_folders(root))
    sources = [dataset.read_session(SessionPlaces(root, one.name), clean, prompts=prompts) for one in places]
    count = sum(len(source.rows) for source in sources)
    if not count:
        return _said(", ".join(names), folder, 0, [f"{', '.join(names)}: no experiment yet, nothing to export"])
    package.place(folder, lambda inside: dataset.write_dataset(inside, sources, chosen, prompts=prompts))
    lines = [
        f"{folder}: {count} experiments of {len(places)} session{'s' * (len(places) > 1)}, README.md is its card",
        "keys, tokens and your own folders are taken out of every text; look at it once before you publish it",
    ]
    return _said(", ".join(names), folder, count, lines)

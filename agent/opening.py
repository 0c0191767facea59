"""Making and opening sessions: the checks before any work, the lock, the branch, model and machine unchanged."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from agent import fingerprint as fingerprints
from agent import repository, results
from agent.errors import InputError
from agent.journal import Journal
from agent.lock import SessionLock
from agent.places import STATE_FOLDER, SessionPlaces
from agent.proposers.base import Proposer
from agent.records import ExperimentState
from agent.session import Options, Session, Show, note_tip, read_options
from agent.timeline import remember
from agent.verbs import Harness
from harness import wire


def create(root: Path, name: str, options: Options) -> None:
    """Make a new session's journal with its settings; checks first everything that a night would stumble over.

    Raises InputError before anything is written when git, results.tsv or the name are not fit.
    """
    places = SessionPlaces(root, name)
    if places.folder.exists():
        raise InputError(
            f"Session {name} exists: continue it with `overnight resume {name}`, or choose another --name."
        )
    results.check_file(places.results)
    if places.folder.parent.exists() and not places.folder.parent.is_dir():
        raise InputError(f"{places.folder.parent} is a file where sessions are kept: move it away, then start again.")
    repository.open_branch(root, name, places.worktree).close()
    if name in repository.session_branches(root):
        raise InputError(
            f"Branch overnight/{name} is left of an earlier session: choose another --name, or delete it with"
            f" `git branch -D overnight/{name}`."
        )
    repository.exclude_state(root)
    journal = Journal(places.journal)
    try:
        journal.set_note("options", wire.to_json(options))
        journal.set_note("fingerprint", _fingerprint_text(options, root))
    finally:
        journal.close()


def discard(places: SessionPlaces) -> None:
    """Remove a session that never got as far as a profile: nothing stays behind."""
    shutil.rmtree(places.folder, ignore_errors=True)
    with_others = any((places.root / STATE_FOLDER).glob("*"))
    if not with_others:
        repository.exclude_state(places.root, excluded=False)
        shutil.rmtree(places.root / STATE_FOLDER, ignore_errors=True)


def open_session(
    places: SessionPlaces,
    harness: Harness,
    show: Show,
    make_proposer: Callable[[Options], Proposer],
    *,
    change: Callable[[Options], Options] = lambda options: options,
    accept_change: bool = False,
) -> Session:
    """Take the lock, open everything, check that model and machine are still the same. Raises InputError."""
    show = remembered(show, places)
    results.check_file(places.results)
    lock = SessionLock(places.lock)
    stale = lock.take()
    journal = Journal(places.journal)
    try:
        stored = read_options(journal)
        options = change(stored)
        _check_fingerprint(journal, options, places, show.say, accept_change=accept_change)
        devices = options.places()
        proposer = make_proposer(options)
        branch = repository.open_branch(places.root, places.name, places.worktree)
    except BaseException:
        journal.close()
        lock.release()
        raise
    if options != stored:
        journal.set_note("options", wire.to_json(options))
    if stale:
        show.say(stale)
    placed = replace(harness, device=devices[0])  # profile and final verification: where the first judge works
    profile = places.read_profile()
    return Session(places, options, journal, branch, lock, placed, proposer, show, make_proposer, devices, profile)


def remembered(show: Show, places: SessionPlaces) -> Show:
    """Speaks as before, and keeps every line for the report."""

    def say(line: str) -> None:
        remember(places.timeline, line)
        show.say(line)

    return replace(show, say=say)


def open_branch_of(session: Session) -> None:
    """Make or repair branch and worktree; says what was repaired and what of the user's set-up is bypassed."""
    branch, journal = session.branch, session.journal
    if journal.note("base") is None:
        journal.set_note("base", branch.head())
    branch.base = journal.note("base") or ""
    if branch.tip() is None and journal.note("tip") is None:
        switches = repository.commit_switches(session.places.root)
        if switches:
            session.say(f"{' and '.join(switches)} are bypassed on {branch.branch}")
    branch.check_not_checked_out()
    experiments = journal.experiments()
    open_ones = [one.number for one in experiments if one.state is not ExperimentState.RECORDED]
    repaired = branch.check_tip(journal.note("tip"), open_ones)
    for line in [*repaired, *branch.open_worktree()]:
        session.say(line)
    note_tip(session)


def _check_fingerprint(
    journal: Journal, options: Options, places: SessionPlaces, say: Callable[[str], None], *, accept_change: bool
) -> None:
    now = _fingerprint_text(options, places.root)
    stored = journal.note("fingerprint")
    if stored == now:
        return
    before: Mapping[str, str] = wire.from_json(dict, stored or "{}")
    model, machine = fingerprints.changes(before, wire.from_json(dict, now))
    if model and not accept_change:
        raise InputError(
            f"The model has changed since session {places.name} began ({', '.join(model)}): resume with"
            " --accept-change to profile it again, or start a new session."
        )
    journal.set_note("fingerprint", now)
    if places.profile.exists():
        places.profile.replace(places.profile_before)
    say(f"changed since the last run: {', '.join([*model, *machine])}; the model is profiled and measured again")


def _fingerprint_text(options: Options, root: Path) -> str:
    return wire.to_json(fingerprints.fingerprint(options.model, options.device, root))

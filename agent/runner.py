"""From a command to a night and its morning: settings, proposer, detaching, final verification, what to do next."""

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agent import loop, measuring, notify, opening
from agent.announcing import announcing
from agent.budget import Budget, amended
from agent.config import Config
from agent.errors import InputError, MachineError, OvernightError, StopRequestedError
from agent.gpu import GpuSensor
from agent.harness_client import HARNESS_ENTRY, PACKAGE_ROOT, StopCheck
from agent.json_reports import VERIFY_MODES
from agent.lock import running
from agent.loop import Ending, Outcome
from agent.machine import is_rocm
from agent.machine_watch import Watch
from agent.places import SessionPlaces, sessions, write_whole
from agent.proposers.base import Proposer
from agent.records import RowStatus
from agent.seating import sensors_of
from agent.session import Options, Session, Show
from agent.stopping import StopFlag
from agent.verbs import Harness
from agent.wakefulness import awake
from harness import wire

DEFAULT_HOURS = 8.0
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DETACH_PATIENCE_S = 10.0
Flags = dict[str, str | None]


def check_settings(config: Config) -> None:
    """Refuse settings that ask for what cannot be done; raises InputError rather than passing over them in silence."""
    if config.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError("overnight.yaml: executor: ray needs Ray: pip install 'overnight[ray]'.")
    notify.check(config.notify)


def check_compiler() -> None:
    """Kernels, Triton and torch.compile all need a C++ compiler; raises MachineError where there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise MachineError(f"There is no C++ compiler ({compiler}): install one (apt install g++), or set CXX.")


def first_budget(config: Config, flags: Flags) -> Budget:
    """The settings' budget with the flags; without any limit a night is eight hours."""
    budget = amended(Budget(**config.budget.model_dump()), flags)
    return budget if budget != Budget() else Budget(hours=DEFAULT_HOURS)


def make_proposer(
    options: Options,
    stop: StopCheck = lambda: False,
    say: Callable[[str], None] = lambda _line: None,
    folder: Path | None = None,
) -> Proposer:
    """The proposer of a session; raises InputError for an unknown or unfinished one."""
    kind, _, rest = options.proposer.partition(":")
    if kind == "replay" and rest:
        from agent.proposers.replay import Replay

        return Replay(Path(rest))
    if options.proposer == "command":
        from agent.proposers.command import CommandProposer

        return CommandProposer(options.command, stop)
    if options.proposer == "playbook":
        from agent.proposers.playbook import Playbook

        return Playbook()
    if options.proposer == "llm":
        from agent.proposers.llm import LlmProposer
        from agent.proposers.playbook.playbook import kernels_folder

        return LlmProposer(options.llm, data=kernels_folder(), folder=folder, stop=stop, say=say)
    raise InputError(f"--proposer {options.proposer} is not known: use playbook, llm, command or replay:DIR.")


def absolute_proposer(name: str) -> str:
    """A replay folder as an absolute path, so that a resume from elsewhere finds it."""
    kind, _, rest = name.partition(":")
    return f"replay:{Path(rest).resolve()}" if kind == "replay" and rest else name


def run_session(
    places: SessionPlaces,
    *,
    show: Show,
    detached: bool,
    change: Callable[[Options], Options] = lambda options: options,
    accept_change: bool = False,
    harness_entry: Path = HARNESS_ENTRY,
    sensors: Callable[[Session], Sequence[GpuSensor]] = sensors_of,
) -> int:
    """Open the session, have its night, verify, and say what is next; returns the exit code."""
    stop = StopFlag()
    stop.listen(detached=detached)
    harness = Harness(places.root, places.log, stop, show.event, harness_entry)
    try:
        with (
            opening.open_session(
                places,
                harness,
                show,
                lambda options: make_proposer(options, stop, show.say, places.folder),
                change=change,
                accept_change=accept_change,
            ) as opened,
            announcing(opened),
            awake(places.name) as inhibited,
        ):
            opened.watch = Watch(sensors(opened), show.say, opened.journal.event, stop)
            if inhibited:
                show.say("this machine is kept from sleeping while the session runs")
            return _whole_night(opened)
    except MachineError as error:
        raise MachineError(
            f"{str(error).rstrip('.')}. Resume with `overnight resume {places.name}` when that is mended."
        ) from error
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise MachineError(
            f"No space is left for {error.filename or 'the session'}: free some, then `overnight resume {places.name}`."
        ) from error


def _whole_night(opened: Session) -> int:
    for line in cautions(opened):
        opened.say(line)
    try:
        outcome = loop.night(opened)
    except InputError:
        if opened.report is None and not opened.journal.experiments() and opened.branch.tip() is None:
            opening.discard(opened.places)  # it never got as far as a profile: nothing stays behind
        raise
    opened.say(f"{outcome.ending}: {outcome.reason}")
    if outcome.ending is not Ending.STOPPED:
        _verify_at_end(opened)
    for line in morning(opened, outcome):
        opened.say(line)
    opened.on_end(outcome.ending, outcome.reason)
    return 1 if outcome.ending is Ending.NOTHING else 0


def cautions(opened: Session) -> list[str]:
    """What the user should know before the night begins."""
    lines = []
    root, name = opened.places.root, opened.places.name
    others = [other for other in sessions(root) if other != name and running(SessionPlaces(root, other).lock)]
    if others:
        lines.append(f"session {', '.join(others)} is running here too: both will measure less reliably")
    if opened.options.budget.dollars is not None and opened.options.proposer == "command":
        lines.append("nobody knows what a call of the command costs: --dollars cannot be enforced")
    if opened.options.proposer == "llm":
        lines += _llm_cautions(opened)
    return lines


def _llm_cautions(opened: Session) -> list[str]:
    """What is sent where, and whether a limit in dollars can be kept."""
    from agent.proposers.llm import unpriced

    places = [f"{one.model} at {one.api_base or 'its provider'}" for one in opened.options.llm.models]
    lines = [f"prompts with this model's operations and program.md are sent to {', '.join(places)}"]
    without = unpriced(opened.proposer) if opened.options.budget.dollars is not None else ()
    if without:
        lines.append(f"the price of {', '.join(without)} is unknown: --dollars cannot be enforced")
    if opened.options.device == "cuda" and is_rocm():
        lines.append("this torch is for AMD devices: CUDA C++ starter kernels are skipped, Triton ones are used")
    return lines


def _verify_at_end(opened: Session) -> None:
    kernels = measuring.kept_kernels(opened.targets, opened.experiments())
    if not kernels:
        return
    opened.say(f"final verification of the model with {len(kernels)} kept kernel{'s' * (len(kernels) > 1)}")
    try:
        report = measuring.verify(opened, kernels, VERIFY_MODES)
    except OvernightError as error:
        opened.say(f"the final verification failed: {error}")
        return
    except StopRequestedError:
        opened.say("the final verification was stopped on request")
        return
    write_whole(opened.places.verified, wire.to_json(report))
    opened.show.verification(report)


def morning(opened: Session, outcome: Outcome) -> list[str]:
    """What was done and what to do next."""
    experiments = opened.journal.experiments()
    kept = [one for one in experiments if one.status is RowStatus.KEEP]
    name = opened.places.name
    lines = [f"{len(experiments)} experiments, {len(kept)} kept; every one is a line of {opened.places.results}"]
    if kept:
        lines.append(f"the night as a page, a picture and text: overnight report {name}")
        lines.append(f"the kept kernels: git log overnight/{name}; measure the model again: overnight verify {name}")
    if outcome.ending is Ending.BUDGET:
        limit = opened.options.budget.experiments
        used_up = limit is not None and len(experiments) >= limit  # more hours alone would end at once
        more = "--experiments +20" if used_up else "--hours +2"
        lines.append(f"go on with more: overnight resume {name} {more}")
    elif outcome.ending is Ending.STOPPED:
        lines.append(f"go on: overnight resume {name}")
    return lines


def detach(places: SessionPlaces, arguments: list[str]) -> int:
    """Start the session in the background, free of this terminal; returns its pid once it holds the lock."""
    command = [sys.executable, "-P", str(PACKAGE_ROOT / "agent" / "__main__.py"), "resume", places.name]
    with places.log.open("ab") as log:
        child = subprocess.Popen(
            [*command, "--in-background", *arguments],
            cwd=places.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    deadline = time.monotonic() + DETACH_PATIENCE_S
    while time.monotonic() < deadline:
        holder = running(places.lock)
        if holder and holder.pid == child.pid:
            return child.pid
        if child.poll() is not None:
            tail = places.log.read_text(encoding="utf-8", errors="replace")[-500:].strip()
            raise MachineError(f"The session ended at once (exit {child.returncode}): {tail}")
        time.sleep(0.05)
    raise MachineError(f"The session did not start within {DETACH_PATIENCE_S:.0f} s; see {places.log}.")

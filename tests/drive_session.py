"""Runs or resumes a session against tests/scripted_harness.py: the real supervisor in a process that tests may kill.

`drive_session.py run|resume WORKSPACE NAME [--experiments N] [--pause-at MOMENT] [--proposer P]`. With `--pause-at`
the supervisor stops for long right after that moment, so that a test can kill it exactly there.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent import journal, opening, repository, runner, session
from agent.budget import amended
from agent.errors import OvernightError
from agent.gpu import GpuLostError, Reading
from agent.llm_settings import LlmFlags
from agent.llm_settings import amended as amended_llm
from agent.places import SessionPlaces
from agent.records import Command, Llm
from harness.records import ModelSpec

SCRIPTED = Path(__file__).resolve().parent / "scripted_harness.py"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["run", "resume"])
    parser.add_argument("workspace", type=Path)
    parser.add_argument("name")
    parser.add_argument("--experiments", default=None)
    parser.add_argument("--pause-at", default=None)
    parser.add_argument("--proposer", default="replay:recordings")
    parser.add_argument("--command", default=None)
    parser.add_argument("--llm", action="append", default=[])
    parser.add_argument("--api-base", default=None)
    parser.add_argument("--api-key-env", default=None)
    parser.add_argument("--call-timeout", type=float, default=30.0)
    parser.add_argument("--dollars", default=None)
    parser.add_argument("--tokens", default=None)
    parser.add_argument("--calls", default=None)
    parser.add_argument("--executor", default="local")
    parser.add_argument("--devices", nargs="*", default=[])
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("--readings", default=None)
    parser.add_argument("--accept-change", action="store_true")
    arguments = parser.parse_args()
    os.chdir(arguments.workspace)
    root = Path.cwd()
    places = SessionPlaces(root, arguments.name)
    if arguments.pause_at:
        pause_after(arguments.pause_at)
    flags = {name: getattr(arguments, name) for name in ("experiments", "dollars", "tokens", "calls")}
    models = LlmFlags(arguments.llm, arguments.api_base, arguments.api_key_env)
    asking = amended_llm(Llm(call_timeout_s=arguments.call_timeout), models)
    try:
        if arguments.verb == "run":
            model = ModelSpec(f"{root / 'model.py'}:Net", device="cpu")
            proposer = runner.absolute_proposer(arguments.proposer)
            options = session.Options(
                model,
                "cpu",
                proposer,
                command=Command((arguments.command or "",)),
                devices=tuple(arguments.devices),
                executor=arguments.executor,
            )
            options = replace(options, llm=asking)
            opening.create(root, arguments.name, options)
        return runner.run_session(
            places,
            show=session.Show(
                say=lambda line: print(line, flush=True),
                event=lambda _name, _body: None,
                ranking=lambda report: print(f"{len(report.targets)} targets", flush=True),
                verification=lambda report: print(f"verified {report.model_speedup:.3f}", flush=True),
            ),
            detached=arguments.detached,
            change=lambda options: replace(
                options,
                budget=amended(options.budget, flags),
                flags=tuple(name for name, value in flags.items() if value),
                command=Command((arguments.command,)) if arguments.command else options.command,
                llm=amended_llm(options.llm, models),
            ),
            accept_change=arguments.accept_change,
            harness_entry=SCRIPTED,
            sensors=lambda opened: [Recorded(opened, arguments.readings)] if arguments.readings else [],
        )
    except OvernightError as error:
        print(f"overnight: {error}", file=sys.stderr)
        return error.exit_code


class Recorded:
    """Readings of a GPU by how many experiments there are: [{"from": 1, "xids": [31]}, {"from": 5, "lost": ""}]."""

    def __init__(self, opened, path) -> None:
        self.opened, self.entries = opened, json.loads(Path(path).read_text())

    def read(self):
        count = len(self.opened.journal.experiments())
        entry = next((one for one in reversed(self.entries) if one["from"] <= count), {"from": 0})
        if "lost" in entry:
            raise GpuLostError(entry["lost"])
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
        values.pop("from")
        if values.pop("once", None):
            self.entries.remove(entry)
        return Reading("GPU-recorded", "NVIDIA Recorded", **values)

    def close(self) -> None:
        self.entries = []


def pause_after(moment: str) -> None:
    """Wait long right after `STATE:NUMBER` became durable, or after `committed:NUMBER` or `taken_out:NUMBER` in git."""
    advance, propose = journal.Journal._advance, journal.Journal.propose
    keep, take_out = repository.SessionBranch.keep, repository.SessionBranch.take_out
    last_kept = []

    def slow_advance(self, number, before, after, values, notes=None):
        advance(self, number, before, after, values, notes)
        wait(after, number)

    def slow_propose(self, *positional, **named):
        number = propose(self, *positional, **named)
        wait("proposed", number)
        return number

    def slow_keep(self, path, judged, message):
        commit = keep(self, path, judged, message)
        last_kept.append(message.experiment)
        wait("committed", message.experiment)
        return commit

    def slow_take_out(self, path, commit, reason):
        reverted = take_out(self, path, commit, reason)
        wait("taken_out", last_kept[-1])
        return reverted

    def wait(reached, number):
        if f"{reached}:{number}" == moment:
            print(f"paused at {moment}", flush=True)
            time.sleep(60)

    journal.Journal._advance, journal.Journal.propose = slow_advance, slow_propose
    repository.SessionBranch.keep, repository.SessionBranch.take_out = slow_keep, slow_take_out


if __name__ == "__main__":
    raise SystemExit(main())

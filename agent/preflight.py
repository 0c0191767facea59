"""Before bed: one throwaway kernel through judge, commit and revert, and what the user should know before leaving."""

import time

import psutil

from agent import disk
from agent.errors import MachineError
from agent.executors.base import Job
from agent.executors.bench import Bench
from agent.journal import now_iso
from agent.machine_watch import foreign_processes, own_processes
from agent.search.targets import DEFAULT_COST_S
from agent.session import Session
from harness.records import JudgeRequest, Verdict

NOTE = "preflight"
KERNEL = "import torch\n\n\ndef kernel_fn(x):\n    return torch.softmax(x, -1)\n"
SHAPE = {"M": 16, "N": 64}
GB = 1e9


def preflight(session: Session, bench: Bench) -> None:
    """Once a session; raises MachineError when judging, committing or reverting does not work here."""
    if session.journal.note(NOTE) is not None:
        return
    started = time.monotonic()
    session.say("preflight: a throwaway kernel through judge, commit and revert")
    _judge(session, bench)
    session.branch.rehearse()
    session.say(f"preflight passed in {time.monotonic() - started:.0f} s")
    for line in [*_room(session), *_company(session), *_budget(session)]:
        session.say(line)
    session.say(f"stop with Ctrl-C or `overnight stop {session.places.name}`; nothing judged is lost")
    session.journal.set_note(NOTE, now_iso())


def _judge(session: Session, bench: Bench) -> None:
    request = JudgeRequest("softmax", KERNEL, None, session.options.device, "float32", SHAPE, bench=False)
    bench.submit(Job(0, request, session.places.folder / "preflight.log"))
    done = bench.wait()
    if done.error:
        raise done.error
    assert isinstance(done.answer, Verdict)
    if not done.answer.accepted:
        raise MachineError(f"The judge refuses PyTorch's own softmax on this machine: {done.answer.detail}")


def _room(session: Session) -> list[str]:
    """Disk and memory."""
    memory = psutil.virtual_memory()
    free = disk.free_bytes(session.places.folder)
    limit = session.options.budget.experiments or _experiments(session)
    needs = (limit or 0) * disk.EXPERIMENT_BYTES
    return [
        f"disk: {free / GB:.1f} GB free, this session may need about {max(needs, 1e8) / GB:.1f} GB",
        f"memory: {memory.available / GB:.1f} of {memory.total / GB:.1f} GB free",
    ]


def _company(session: Session) -> list[str]:
    """The GPUs, and who else is on them."""
    lines, own = [], own_processes()
    for sensor in session.watch.sensors:
        reading = sensor.read()
        others = foreign_processes(reading, own)
        free = "n/a" if reading.memory_free_mb is None else f"{reading.memory_free_mb / 1024:.1f} GB free"
        heat = "n/a" if reading.temperature_c is None else f"{reading.temperature_c} °C"
        who = f"others on it: pid {', '.join(map(str, others))}" if others else "nobody else on it"
        if reading.processes is None:
            who = "who else is on it: n/a"
        lines.append(f"{reading.name or 'GPU'} {reading.uuid}: {free}, {heat}, {who}")
    return lines


def _budget(session: Session) -> list[str]:
    """What it buys, roughly: an experiment's cost is not known before the first ones."""
    budget, count = session.options.budget, _experiments(session)
    if budget.hours is None or count is None:
        return [f"budget: {budget.experiments} experiments"] if budget.experiments is not None else []
    if budget.experiments is not None and budget.experiments <= count:
        return [f"budget: {budget.experiments} experiments, or {budget.hours:g} h"]
    return [f"budget: {budget.hours:g} h buy very roughly {count} experiments, at {_cost_s(session):.0f} s each"]


def _experiments(session: Session) -> int | None:
    hours = session.options.budget.hours
    return None if hours is None else int(hours * 3600 * 0.9 / _cost_s(session))


def _cost_s(session: Session) -> float:
    known = session.journal.judge_seconds()
    if known:
        return sum(known.values()) / len(known)
    return 10.0 if session.options.device == "cuda" else DEFAULT_COST_S

"""Which devices a session works on, and how a process is pinned to one: GPUs by UUID, CPU cores by a share each."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent import machine
from agent.errors import InputError

EVERY = "all"


@dataclass(frozen=True)
class Device:
    """One device as a process sees it: what its environment says, the cores it may run on, what it leases."""

    name: str = ""  # empty: whatever the machine offers, unpinned
    environment: tuple[tuple[str, str], ...] = ()
    cores: tuple[int, ...] = ()
    leases: tuple[str, ...] = ()
    kind: str = "cpu"


ANYWHERE = Device()


def devices_of(asked: Sequence[str], kind: str) -> tuple[Device, ...]:
    """The devices that `devices:` of overnight.yaml names, for a session on `kind` ("cpu" or "cuda").

    Raises InputError for a name that is unknown, twice there or of another kind.
    """
    if not asked:
        return (ANYWHERE,)
    _check_once(asked)
    return _cpus(asked) if kind == "cpu" else _gpus(asked)


def counted(asked: Sequence[str], kind: str) -> tuple[Device, ...]:
    """As many devices of a cluster as are named, wherever it has them: the names are for messages."""
    _check_once(asked)
    wrong = [name for name in asked if not re.fullmatch(rf"{kind}:\d+", name)]
    if wrong:
        raise InputError(f"devices: {wrong[0]}: with executor: ray name as many as are wanted: {kind}:0, {kind}:1, ...")
    return tuple(Device(name, kind=kind) for name in asked or (f"{kind}:0",))


def _check_once(asked: Sequence[str]) -> None:
    twice = sorted({name for name in asked if list(asked).count(name) > 1})
    if twice:
        raise InputError(f"devices: {twice[0]} is there twice; each device is one judge's alone.")


def _cpus(asked: Sequence[str]) -> tuple[Device, ...]:
    """`cpu:0`, `cpu:1`, ...: the cores of this machine in equal, disjoint shares."""
    wrong = [name for name in asked if not re.fullmatch(r"cpu:\d+", name)]
    if wrong:
        raise InputError(f"devices: {wrong[0]} is not one for --device cpu: name them cpu:0, cpu:1 and so on.")
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(asked)
    if share == 0:
        raise InputError(f"devices: {len(asked)} CPU devices are asked for, but this machine has {len(cores)} cores.")
    ordered = sorted(asked, key=lambda name: int(name.partition(":")[2]))
    return tuple(_cpu(name, tuple(cores[place * share : (place + 1) * share])) for place, name in enumerate(ordered))


def _cpu(name: str, cores: tuple[int, ...]) -> Device:
    environment = (("OMP_NUM_THREADS", str(len(cores))),)
    return Device(name, environment, cores, tuple(f"core-{core}" for core in cores))


def _gpus(asked: Sequence[str]) -> tuple[Device, ...]:
    """`cuda:N`, a UUID, or `all`."""
    gpus = machine.gpus()
    if list(asked) == [EVERY]:
        return tuple(_gpu(gpu) for gpu in gpus)
    known = {name: gpu for gpu in gpus for name in (f"cuda:{gpu.index}", gpu.uuid)}
    wrong = [name for name in asked if name not in known]
    if wrong:
        there = ", ".join(f"cuda:{gpu.index} ({gpu.uuid}, {gpu.name})" for gpu in gpus) or "none"
        raise InputError(f"devices: {wrong[0]} is not a GPU that is visible here; there is {there}.")
    chosen = [known[name] for name in asked]
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        raise InputError(f"devices: {', '.join(asked)} name one GPU twice; each device is one judge's alone.")
    if len({gpu.name for gpu in chosen}) > 1:
        raise InputError(
            f"devices: {', '.join(sorted({gpu.name for gpu in chosen}))} are different models: what is faster on one"
            " need not be on the other; name devices of one model."
        )
    return tuple(_gpu(gpu) for gpu in chosen)


def _gpu(gpu: machine.Gpu) -> Device:
    return Device(f"cuda:{gpu.index}", machine.pin(gpu), leases=(gpu.uuid,), kind="cuda")

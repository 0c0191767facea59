"""Who sits on a session's bench: a judge for each device, here or on Ray, and a slow proposer at desks of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.devices import devices_of
from agent.executors.base import Seat
from agent.executors.bench import Bench, StopCheck
from agent.executors.desk import DeskSeat
from agent.executors.local import LocalSeat
from agent.gpu import GpuSensor, NvmlSensor
from agent.machine import gpus
from agent.proposers.base import Parallel
from agent.session import RAY, Session
from agent.verbs import Harness

Make = Callable[[Harness], Sequence[Seat]]


def open_bench(session: Session) -> Bench:
    """The session's bench with a seat for each of its devices; no judge is started before the first job.

    Raises MachineError at once when a Ray cluster cannot be had or lacks what is asked for.
    """
    judges, at_end = _on_ray(session) if session.options.executor == RAY else (_here(session), _nothing)

    def seats(stop: StopCheck) -> list[Seat]:
        desks = session.proposer.lanes if isinstance(session.proposer, Parallel) else 0
        return [
            *judges(replace(session.harness, stop=stop)),
            *(DeskSeat(lambda: session.proposer) for _ in range(desks)),
        ]

    return Bench(seats, session.harness.stop, session.say, at_end)


def _here(session: Session) -> Make:
    return lambda harness: [LocalSeat(harness, session.say, device) for device in session.devices]


def _on_ray(session: Session) -> tuple[Make, Callable[[], None]]:
    """Seats on the cluster, and how to leave it. One that we start here shares out this machine's cores."""
    from agent.executors.ray_cluster import Cluster, RaySeat, is_local

    kind, names = session.options.device, [device.name for device in session.devices]
    devices = devices_of(names, kind) if kind == "cpu" and is_local() else session.devices
    cluster = Cluster(devices, kind)
    folder = session.places.folder / "ray" if is_local() else None

    def make(harness: Harness) -> list[Seat]:
        return [RaySeat(cluster, device, harness, session.say, folder) for device in devices]

    return make, cluster.close


def _nothing() -> None:
    """A local bench has no cluster to leave."""


def sensors_of(session: Session) -> list[GpuSensor]:
    """One for each GPU that the session works on, by UUID; none on a CPU. Raises GpuLostError for one that is gone."""
    if session.options.device != "cuda" or session.options.executor == RAY:
        return []
    pinned = [uuid for device in session.devices for uuid in device.leases]
    uuids = pinned or [gpu.uuid for gpu in gpus()[:1]]  # unpinned, torch takes the first visible one
    return [NvmlSensor(uuid) for uuid in uuids]

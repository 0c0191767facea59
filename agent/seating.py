"""Who sits on a session's bench: a judge for each device of this host, and a slow proposer at desks of its own."""

from dataclasses import replace

from agent.executors.base import Seat
from agent.executors.bench import Bench, StopCheck
from agent.executors.desk import DeskSeat
from agent.executors.local import LocalSeat
from agent.proposers.base import Parallel
from agent.session import Session


def open_bench(session: Session) -> Bench:
    """The session's bench with a seat for each of its devices; nothing is started before the first job."""

    def seats(stop: StopCheck) -> list[Seat]:
        harness = replace(session.harness, stop=stop)
        desks = session.proposer.lanes if isinstance(session.proposer, Parallel) else 0
        judges = [LocalSeat(harness, session.say, device) for device in session.devices]
        return [*judges, *(DeskSeat(session.proposer) for _ in range(desks))]

    return Bench(seats, session.harness.stop, session.say)

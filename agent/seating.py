"""Who sits on a session's bench: a judge for each device of this host."""

from dataclasses import replace

from agent.executors.bench import Bench, StopCheck
from agent.executors.local import LocalSeat
from agent.session import Session


def open_bench(session: Session) -> Bench:
    """The session's bench with a seat for each of its devices; nothing is started before the first job."""

    def seats(stop: StopCheck) -> list[LocalSeat]:
        harness = replace(session.harness, stop=stop)
        return [LocalSeat(harness, session.say, device) for device in session.devices]

    return Bench(seats, session.harness.stop, session.say)

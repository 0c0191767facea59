"""What a session tells its user who is not looking: the first win, the end, a stop and its reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.config import load_config
from agent.errors import OvernightError
from agent.morning.headline import headline
from agent.morning.night import Night, read_night
from agent.notify import Announcer, News
from agent.records import Experiment
from agent.session import Session
from agent.timeline import remember
from agent.visible import one_line

LAST_PATIENCE_S = 10.0  # the process may be the last of its container: the end's message gets a moment to leave
STOP_PATIENCE_S = 2.0  # somebody waits for the stop
FIRST_WIN = "first_win"


@contextmanager
def announcing(session: Session) -> Iterator[None]:
    """Tell of what happens inside, and of the failure that ends it."""
    announcer = Announcer(session.places.root, lambda: _entries(session), session.say)
    session.on_keep = lambda experiment: _first_win(session, announcer, experiment)
    session.on_end = lambda ending, reason: announcer.tell(lambda: ended(read_night(session.places), ending, reason))
    try:
        yield
    except (OvernightError, OSError) as error:
        reason = str(error)
        remember(session.places.timeline, f"ended: {reason}")
        announcer.tell(lambda: stopped(session.places.name, reason))
        raise
    finally:
        announcer.complain(STOP_PATIENCE_S if session.harness.stop() else LAST_PATIENCE_S, last=True)


def _entries(session: Session) -> list[str]:
    file = session.options.config
    return load_config(session.places.root, Path(file) if file else None).notify


def _first_win(session: Session, announcer: Announcer, experiment: Experiment) -> None:
    if session.journal.note(FIRST_WIN) is None:
        session.journal.set_note(FIRST_WIN, str(experiment.number))
        announcer.tell(lambda: first_win(session.places.name, experiment))


def first_win(session: str, one: Experiment) -> News:
    """The first kept kernel."""
    timing = one.verdict.timing if one.verdict else None
    assert timing is not None
    body = (
        f"{one.target} runs {timing.speedup_vs_best:.3g} times as fast (95% {timing.ci_low:.3g} to"
        f" {timing.ci_high:.3g}; experiment {one.number})."
    )
    if one.model_speedup is not None:
        body += f" The model runs {one.model_speedup:.3g} times as fast as the fastest other way."
    facts = {
        "experiment": one.number,
        "target": one.target,
        "commit": one.commit,
        "speedup_vs_best": timing.speedup_vs_best,
        "ci_low": timing.ci_low,
        "ci_high": timing.ci_high,
        "model_ms": one.model_ms,
        "model_speedup": one.model_speedup,
    }
    return News(FIRST_WIN, session, f"Overnight, {session}: first win", body, facts)


def ended(night: Night, ending: str, reason: str) -> News:
    """A run's end that is none of the machine's doing: `stop` when somebody asked for it, else `finish`."""
    top, event = headline(night), "stop" if ending == "stopped" else "finish"
    counts = f"{len(night.trials)} experiments, {len(night.kept)} kept"
    body = f"{top.sentence} {counts}. {ending.capitalize()}: {one_line(reason)}."
    facts = {
        "reason": reason,
        "ending": ending,
        "experiments": len(night.trials),
        "kept": len(night.kept),
        "headline": top.sentence,
        "model_speedup": top.gain.ratio if top.gain else None,
        "ci_low": top.gain.low if top.gain else None,
        "ci_high": top.gain.high if top.gain else None,
        "against": top.against or None,
        "model_ms": top.after_ms,
    }
    return News(event, night.name, f"Overnight, {night.name}: {ending}", body, facts)


def stopped(session: str, reason: str) -> News:
    """The machine, a provider or the user's input ended it."""
    words = one_line(reason, 1000)
    return News("stop", session, f"Overnight, {session}: stopped", words, {"reason": words, "ending": "failed"})

"""What a session is doing at this moment, read off the log of the experiment that is open."""

import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from agent.gpu import GpuLostError, NvmlSensor
from agent.machine import gpus
from agent.morning.night import Night, seconds
from agent.places import SessionPlaces
from agent.progress import event_words

TAIL_BYTES = 8192


@dataclass(frozen=True)
class Activity:
    """What is going on, and since when (seconds)."""

    words: str
    since_s: float


def activity(places: SessionPlaces, night: Night) -> Activity | None:
    """None when the session is not running."""
    if night.status.pid is None:
        return None
    open_one = night.trial(night.status.open_experiment or 0)
    now = seconds(night.read_at)
    if open_one is None:
        doing = "profiling the model" if night.profile is None else "choosing what to try next"
        return Activity(doing, 0.0)
    last = _last_event(places.experiment(open_one.number) / "log.txt")
    words = f"experiment {open_one.number} on {open_one.target}: {last or 'judging'}"
    return Activity(words, max(0.0, now - seconds(open_one.experiment.started_at)))


def machine_words() -> str:
    """How busy this machine is: what else runs on it makes every measurement noisier."""
    memory = psutil.virtual_memory()
    load = f"load {os.getloadavg()[0]:.1f} on {psutil.cpu_count() or 1} processors"
    words = f"{load}, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory free"
    return "; ".join([words, *(_gpu_words(gpu.uuid) for gpu in gpus())])


def _gpu_words(uuid: str) -> str:
    """One GPU in a line; what it does not tell is left out."""
    try:
        with closing(NvmlSensor(uuid)) as sensor:
            now = sensor.read()
    except GpuLostError as error:
        return str(error)
    used = now.memory_total_mb - now.memory_free_mb if now.memory_total_mb and now.memory_free_mb is not None else None
    figures = {
        "{:.0f}% busy": now.utilisation,
        "{:.0f} MB used": used,
        "{:.0f} °C": now.temperature_c,
        "{:.0f} W": now.power_w,
        "{:.0f} MHz": now.sm_mhz,
    }
    told = [words.format(value) for words, value in figures.items() if value is not None]
    return " ".join([now.name or uuid, ", ".join([*told, *(now.throttle or ())]) or "n/a"])


def _last_event(log: Path) -> str:
    """The judge's last word, such as "judging: stability pass"."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        _, _, rest = line.partition(" ")
        name, _, text = rest.partition(" ")
        try:
            body = json.loads(text)
        except ValueError:
            continue
        if isinstance(body, dict):
            return event_words(name, body)
    return ""

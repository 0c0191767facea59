"""The watch over the machine: recorded readings and errors go through the seam that NVML goes through."""

import json
import os
import time

import psutil
import pytest
from workspaces import drive, kernel, make_workspace, rows

from agent import disk
from agent.errors import MachineError
from agent.gpu import GpuLostError, Reading
from agent.journal import Journal
from agent.machine_watch import Watch, foreign_processes, own_processes, trouble_of

SIX = {f"{number:04d}_rmsnorm_a__n{number}.py": kernel("discard 1", name=str(number)) for number in range(1, 7)}
HOT = Reading("GPU-1", throttle=("too hot",))


class Script:
    """Plays readings, the last one for ever."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        one = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(one, Exception):
            raise one
        return one

    def close(self):
        self.readings = []


def watch(*readings, **options):
    said, recorded = [], []
    made = Watch([Script(*readings)], said.append, recorded.append, poll_s=0.01, limit_s=0.1, **options)
    return made, said, recorded


def night(folder, readings, recordings=SIX, *arguments, verb="run"):
    if verb == "run":
        make_workspace(folder, recordings=recordings)
    (folder / "readings.json").write_text(json.dumps(readings))
    return drive(folder, verb, "--readings", "readings.json", *arguments, check=False)


# Pure


def test_figures_that_are_not_available_are_no_trouble():
    assert trouble_of(Reading("GPU-1"), (), idle=True) is None


def test_harmful_throttling_is_trouble_and_a_power_cap_is_not_among_it():
    assert trouble_of(HOT, (), idle=False).fatal
    assert trouble_of(Reading("GPU-1", throttle=()), (), idle=False) is None


def test_another_process_is_trouble_only_when_it_works_and_we_do_not():
    busy, quiet = Reading("GPU-1", utilisation=95), Reading("GPU-1", utilisation=3)
    assert trouble_of(busy, (42,), idle=True).words == "another process uses GPU GPU-1 (pid 42, 95% busy)"
    assert trouble_of(busy, (42,), idle=False) is None
    assert trouble_of(quiet, (42,), idle=True) is None
    assert trouble_of(busy, (), idle=True) is None


def test_our_own_processes_and_pids_of_another_namespace_are_not_foreign():
    nobody = max(psutil.pids()) + 100_000
    reading = Reading("GPU-1", processes=(os.getpid(), nobody, os.getppid()))
    assert foreign_processes(reading, own_processes()) == (os.getppid(),)


# Waiting


def test_it_waits_until_the_device_is_fit_and_says_so_once():
    made, said, recorded = watch(HOT, HOT, HOT, Reading("GPU-1"))
    made.limit_s = 5.0
    made.look(idle=True)
    assert said == ["GPU GPU-1 is throttled: too hot: waiting, at most 5 s", "the devices are fit again"]
    assert recorded == ["GPU GPU-1 is throttled: too hot"]


def test_it_never_waits_for_ever():
    made, _, _ = watch(HOT)
    begin = time.monotonic()
    with pytest.raises(MachineError, match="throttled: too hot, for 0 s"):
        made.look(idle=True)
    assert time.monotonic() - begin < 5


def test_a_busy_device_is_measured_on_after_the_wait_and_a_stop_ends_it():
    foreign = Reading("GPU-1", utilisation=99, processes=(os.getppid(),))
    made, said, _ = watch(foreign)
    made.look(idle=True)
    assert "measuring all the same" in said[-1]
    stopped, _, _ = watch(HOT, stop=lambda: True)
    stopped.look(idle=True)


def test_a_crash_is_doubted_after_an_xid_or_when_it_is_the_third_in_a_row():
    made, _, recorded = watch(Reading("GPU-1", xids=(79,)), Reading("GPU-1", xids=()))
    assert made.doubt(crashed=True) == "GPU GPU-1 reported Xid 79"
    assert recorded == ["GPU GPU-1 reported Xid 79"]
    assert made.doubt(crashed=True) is None
    assert made.doubt(crashed=True) == "3 candidates crashed in a row"
    assert made.doubt(crashed=True) is None
    assert made.doubt(crashed=False) is None


def test_a_lost_device_is_raised_and_recorded():
    made, _, recorded = watch(GpuLostError("GPU GPU-1 is lost"))
    with pytest.raises(GpuLostError):
        made.look(idle=True)
    assert recorded == ["GPU GPU-1 is lost"]


# In a session


def test_a_gpu_that_vanishes_from_experiment_five_stops_resumably_without_false_crash_rows(tmp_path):
    crash = {"0005_rmsnorm_a__n5.py": kernel("crash", name="5")}
    said = night(tmp_path, [{"from": 5, "lost": "GPU GPU-recorded is lost (GPU is lost)"}], {**SIX, **crash})
    assert said.endswith("exit 3")
    assert "GPU GPU-recorded is lost" in said
    assert "Resume with `overnight resume night`" in said
    assert [row["status"] for row in rows(tmp_path)] == ["discard"] * 4 + ["environment"]
    assert "the device was lost" in rows(tmp_path)[-1]["description"]
    said = night(tmp_path, [{"from": 0}], verb="resume")
    assert said.endswith("exit 0")
    assert [row["status"] for row in rows(tmp_path)][4:] == ["environment", "crash", "discard"]
    assert len(SIX) == len(rows(tmp_path)) - 1


def test_after_an_xid_the_original_is_judged_before_the_candidate_is_blamed(tmp_path):
    recordings = {**SIX, "0002_rmsnorm_a__n2.py": kernel("crash", name="2")}
    said = night(tmp_path, [{"from": 2, "xids": [31], "once": True}], recordings)
    assert "but GPU GPU-recorded reported Xid 31: the original is judged first" in said
    assert rows(tmp_path)[1]["status"] == "crash"


def test_when_the_original_crashes_too_the_row_says_environment(tmp_path):
    recordings = {**SIX, "0002_rmsnorm_a__n2.py": kernel("crash", name="2")}
    night(tmp_path, [{"from": 0}], recordings, "--experiments", "1")
    (tmp_path / ".overnight/night/originals_crash").touch()
    said = night(tmp_path, [{"from": 2, "xids": [79], "once": True}], recordings, "--experiments", "9", verb="resume")
    assert "exit" in said
    assert rows(tmp_path)[1]["status"] == "environment"
    assert "the original fails here too" in rows(tmp_path)[1]["description"]
    journal = Journal(tmp_path / ".overnight/night/journal.sqlite", read_only=True)
    assert next(what for _, what in journal.events()) == "GPU GPU-recorded reported Xid 79"
    journal.close()


def test_three_crashes_in_a_row_are_doubted_without_any_gpu(tmp_path):
    recordings = {name: source.replace("discard 1", "crash") for name, source in SIX.items()}
    make_workspace(tmp_path, recordings=recordings)
    said = drive(tmp_path, "run")
    assert said.count("the original is judged first") == 2
    assert {row["status"] for row in rows(tmp_path)} == {"crash"}


# Preflight and disk


def test_the_preflight_comes_first_once_and_says_what_one_needs_to_know(tmp_path):
    said = night(tmp_path, [{"from": 0, "temperature_c": 40, "memory_free_mb": 1024.0, "processes": [os.getppid()]}])
    lines = said.splitlines()
    assert lines[0].startswith("preflight: a throwaway kernel")
    assert lines[1].startswith("preflight passed in")
    assert f"NVIDIA Recorded GPU-recorded: 1.0 GB free, 40 °C, others on it: pid {os.getppid()}" in lines
    assert any(line.startswith("disk: ") for line in lines)
    assert "stop with Ctrl-C or `overnight stop night`; nothing judged is lost" in lines
    from workspaces import git

    assert git(tmp_path, "for-each-ref", "refs/overnight") == ""
    assert "preflight:" not in drive(tmp_path, "resume", "--readings", "readings.json")


def test_what_is_kept_free_of_a_disk():
    assert disk.reserve_bytes(10 << 40) == 1 << 30
    assert disk.reserve_bytes(100 << 20) == 5 << 20
    assert disk.short_of_space([]) is None

"""Several devices in one night: judged at once, pinned, leased; winners proven one by one; a sick device set aside."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from workspaces import drive, git, kernel, make_workspace, rows, start

from agent.devices import Device, devices_of
from agent.errors import InputError, MachineError, StopRequestedError
from agent.executors.base import Job, Kind
from agent.executors.bench import Bench
from agent.lease import leased
from agent.machine import Gpu, pin, visible
from agent.records import Brief, NothingLeft
from harness.records import JudgeRequest

TWO = ("--devices", "cpu:0", "cpu:1")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def judged(workspace):
    return (workspace / ".overnight/night/judged.txt").read_text().split()


# Devices


def test_the_cores_are_shared_out_without_overlap_and_processes_are_told_how_many_they_have():
    cores = sorted(os.sched_getaffinity(0))
    devices = devices_of([f"cpu:{number}" for number in range(len(cores))], "cpu")
    assert [device.cores for device in devices] == [(core,) for core in cores]
    assert all(dict(device.environment)["OMP_NUM_THREADS"] == "1" for device in devices)
    assert len({lease for device in devices for lease in device.leases}) == len(cores)
    assert devices_of([], "cpu") == (Device(),)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (["cpu:0", "cpu:0"], "cpu", "cpu:0 is there twice"),
        (["cuda:0"], "cpu", "cuda:0 is not one for --device cpu"),
        (["gpu"], "cpu", "name them cpu:0, cpu:1"),
        ([f"cpu:{number}" for number in range(10_000)], "cpu", "10000 CPU devices are asked for"),
        (["cuda:99"], "cuda", "cuda:99 is not a GPU that is visible here"),
        (["GPU-nonsense"], "cuda", "GPU-nonsense is not a GPU"),
        (["cpu:0"], "cuda", "cpu:0 is not a GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(asked, kind, words):
    with pytest.raises(InputError, match=words):
        devices_of(asked, kind)


def test_visible_gpus_are_those_that_cuda_would_show_in_its_order():
    found = [("GPU-aa", "H200"), ("GPU-bb", "H200"), ("GPU-bc", "A100")]
    assert [gpu.uuid for gpu in visible(found, None)] == ["GPU-aa", "GPU-bb", "GPU-bc"]
    assert visible(found, "2,0") == (Gpu(0, "GPU-bc", "A100"), Gpu(1, "GPU-aa", "H200"))
    assert [gpu.uuid for gpu in visible(found, "GPU-aa,1")] == ["GPU-aa", "GPU-bb"]
    assert visible(found, "") == visible(found, "-1") == ()
    assert [gpu.uuid for gpu in visible(found, "0,7,1")] == ["GPU-aa"]
    assert visible(found, "GPU-b") == ()  # names two
    assert dict(pin(Gpu(3, "GPU-bb", "H200")))["CUDA_VISIBLE_DEVICES"] == "GPU-bb"


def test_a_lease_is_one_holders_alone_and_a_stop_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inside = []

    def work(name):
        with leased(["core-1", "core-0"], lambda: False):
            inside.append(name)
            assert len(inside) == 1
            time.sleep(0.05)
            inside.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with leased(["core-0"], lambda: False), pytest.raises(StopRequestedError), leased(["core-0"], lambda: True):
        pytest.fail("held twice")


# The bench


@dataclass
class Scripted:
    """A seat that does what its script says of each experiment: an answer, an exception, or a wait for an event."""

    name: str
    script: dict
    broken: str | None = None
    kinds: frozenset = frozenset({Kind.JUDGE, Kind.MEASURE})
    did: list = field(default_factory=list)
    closed: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def run(self, job):
        self.did.append(job.number)
        answer = self.script.get(job.number, f"{self.name}:{job.number}")
        if isinstance(answer, threading.Event):
            answer.wait(20)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fault(self):
        self.asked.set()
        return self.broken

    def close(self):
        self.closed = True


def job(number):
    return Job(number, JudgeRequest("softmax", "source"), Path("log.txt"))


def bench_of(*seats, stop=lambda: False, said=None):
    return Bench(lambda _stop: seats, stop, (said if said is not None else []).append)


def test_a_device_that_does_not_answer_after_a_failure_is_set_aside_and_the_others_go_on():
    said = []
    sick = Scripted("b", {n: MachineError("gone") for n in range(9)}, broken="it fell off the bus")
    well = Scripted("a", dict.fromkeys(range(9), sick.asked))
    with bench_of(well, sick, said=said) as bench:
        for number in range(1, 9):
            bench.submit(job(number))
        ends = [bench.wait() for _ in range(8)]
    assert len(sick.did) == 1
    assert [done.error is None for done in ends].count(False) == 1
    assert said == ["b is set aside for this run: it fell off the bus"]
    assert well.closed
    assert sick.closed


def test_the_only_device_is_never_set_aside():
    with bench_of(Scripted("a", {1: MachineError("x")}, broken="gone")) as bench:
        bench.submit(job(1))
        assert bench.wait().error is not None
        bench.submit(job(2))
        assert bench.wait().answer == "a:2"


def test_there_is_room_for_one_job_on_one_device_and_for_one_ahead_on_several():
    gate = threading.Event()
    with bench_of(Scripted("a", {1: gate})) as bench:
        bench.submit(job(1))
        assert not bench.room
        gate.set()
        bench.wait()
        assert bench.room
    with bench_of(*(Scripted(str(seat), {}) for seat in range(8))) as bench:
        count = 0
        while bench.room:
            count += 1
            bench.submit(job(count))
        assert count == 10


def test_a_fault_of_our_own_is_raised_where_somebody_reads_it():
    with bench_of(Scripted("a", {1: ValueError("ours")})) as bench:
        bench.submit(job(1))
        with pytest.raises(ValueError, match="ours"):
            bench.wait()


def test_a_proposer_thinks_while_the_device_is_busy(tmp_path):
    gate, brief = threading.Event(), Brief(None, "cpu", "", {}, None, None, (), "")
    desk = Scripted("desk", {-1: NothingLeft("a", "nothing")}, kinds=frozenset({Kind.PROPOSE}))
    with bench_of(Scripted("a", {1: gate}), desk) as bench:
        assert bench.desks
        bench.submit(job(1))
        assert bench.room
        bench.ask(brief)
        assert bench.thinking == 1
        assert bench.wait().answer == NothingLeft("a", "nothing")
        assert bench.busy
        gate.set()
        assert bench.wait().job.number == 1


# Whole nights


@needs_two_cores
def test_two_devices_judge_at_the_same_time(tmp_path):
    meeting = {f"000{n}_{t}__x{n}.py": kernel("discard 1", "# meets: 2", name=str(n))
               for n, t in ((1, "rmsnorm_a"), (2, "softmax_b"))}  # fmt: skip
    workspace = make_workspace(tmp_path, recordings=meeting)
    drive(workspace, "run", *TWO)
    assert sorted(row["status"] for row in rows(workspace)) == ["discard", "discard"]


@needs_two_cores
def test_a_winner_over_a_kernel_that_was_beaten_meanwhile_is_judged_again(tmp_path):
    both = {f"000{n}_rmsnorm_a__x{n}.py": kernel("keep 1.5", "# meets: 2", name=str(n)) for n in (1, 2)}
    workspace = make_workspace(tmp_path, recordings=both)
    said = drive(workspace, "run", *TWO)
    assert "beat a kernel that was beaten meanwhile: it is judged again" in said
    assert [row["status"] for row in rows(workspace)] == ["keep", "keep"]
    assert len(judged(workspace)) == 3
    last = rows(workspace)[-1]
    assert git(workspace, "rev-parse", "overnight/night") == last["commit"]


@needs_two_cores
def test_a_judge_that_dies_on_one_device_does_not_disturb_the_other(tmp_path):
    some = {"0001_rmsnorm_a__x.py": kernel("keep", "# dies"),
            "0002_softmax_b__y.py": kernel("keep 1.5", "# slow: 1.0")}  # fmt: skip
    workspace = make_workspace(tmp_path, recordings=some)
    drive(workspace, "run", *TWO)
    assert {row["target"]: row["status"] for row in rows(workspace)} == {"rmsnorm_a": "environment",
                                                                         "softmax_b": "keep"}  # fmt: skip


@needs_two_cores
def test_a_broken_device_costs_one_experiment_and_the_night_goes_on_with_the_other(tmp_path):
    some = {f"000{n}_{'rmsnorm_a' if n % 2 else 'softmax_b'}__x{n}.py": kernel("discard 1", "# slow: 0.1", name=str(n))
            for n in range(1, 8)}  # fmt: skip
    workspace = make_workspace(tmp_path, recordings=some)
    core = sorted(os.sched_getaffinity(0))[len(os.sched_getaffinity(0)) // 2]
    process = start(workspace, "run", *TWO)
    while not (workspace / ".overnight/night").exists():
        time.sleep(0.01)
    (workspace / ".overnight/night" / f"broken-{core}").touch()
    said, _ = process.communicate(timeout=60)
    assert "cpu:1 is set aside" in said, said
    statuses = [row["status"] for row in rows(workspace)]
    assert statuses.count("environment") == 1
    assert statuses.count("discard") == 6


@needs_two_cores
def test_a_kill_in_the_middle_of_a_parallel_night_loses_nothing(tmp_path):
    slow = {f"000{n}_{'rmsnorm_a' if n % 2 else 'softmax_b'}__x{n}.py": kernel("discard 1", "# slow: 0.4", name=str(n))
            for n in range(1, 7)}  # fmt: skip
    workspace = make_workspace(tmp_path, recordings=slow)
    process = start(workspace, "run", *TWO, "--pause-at", "recorded:2")
    for line in process.stdout:
        if line.startswith("paused at"):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    drive(workspace, "resume")
    statuses = [row["status"] for row in rows(workspace)]
    assert statuses.count("discard") == 6
    assert 1 <= statuses.count("interrupted") <= 3
    assert sorted(int(row["experiment"]) for row in rows(workspace)) == list(range(1, len(statuses) + 1))


@needs_two_cores
def test_a_stop_ends_all_judges_within_a_second_and_marks_what_was_in_flight(tmp_path):
    slow = {f"000{n}_rmsnorm_a__x{n}.py": kernel("discard 1", "# slow: 30", name=str(n)) for n in (1, 2)}
    workspace = make_workspace(tmp_path, recordings=slow)
    process = start(workspace, "run", *TWO)
    journal = workspace / ".overnight/night/judged.txt"
    while not journal.exists() or len(journal.read_text().split()) < 2:
        time.sleep(0.02)
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=20)
    assert time.monotonic() - began < 3  # one second on a quiet machine; the judges' seats give up within 0.2
    assert process.returncode == 0
    assert [row["status"] for row in rows(workspace)] == ["interrupted", "interrupted"]

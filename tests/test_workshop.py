"""Real workers forked from a real warm parent: what a kernel does costs its own worker and nothing else."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from harness.arena import Arena
from harness.harvest import MOST_BYTES, MOST_FILES, harvest, open_below
from harness.workshop import (
    Execution,
    KernelRaised,
    Limits,
    PreparedCall,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
    Workshop,
)

ROOT = Path(__file__).resolve().parent.parent
ADD = "def kernel_fn(x, y):\n    return x + y\n"
SCALED = "def kernel_fn(x, *, factor, shift=0.0):\n    return x * factor + shift\n"


@pytest.fixture(scope="module")
def shop():
    with Workshop("cpu", Limits(memory_bytes=3 << 30, processes=40, output_bytes=32 << 20), threads=1) as opened:
        yield opened


@pytest.fixture
def arena():
    made = Arena("cpu", 64 << 20)
    yield made
    made.close()


def run(shop, arena, source, *tensors, constants=None, execution=Execution.PLAIN, outputs=None, timeout_s=60.0):
    """Open a worker, call its kernel once; the report and copies of what arrived in the slots."""
    inputs = [arena.place(tensor) for tensor in tensors]
    slots = [arena.reserve(like.shape, like.dtype) for like in (outputs or [tensors[0]])]
    with shop.open(source, arena, execution=execution) as worker:
        worker.load(timeout_s)
        report = worker.call(inputs, constants or {}, slots, timeout_s)
    return report, [arena.tensor(slot).clone() for slot in slots]


def assert_healthy(shop, arena):
    x, y = torch.randn(300, 300), torch.randn(300, 300)
    _, (result,) = run(shop, arena, ADD, x, y)
    assert torch.equal(result, x + y)


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.OP])
def test_a_kernel_computes_on_the_judges_memory(shop, arena, execution):
    x, y = torch.randn(50, 70).t(), torch.randn(70, 1)
    report, (result,) = run(shop, arena, ADD, x, y, execution=execution, outputs=[torch.empty(70, 50)])
    assert torch.equal(result, x + y)
    assert report.count == 1
    (output,) = report.outputs
    assert (output.type_name, output.dtype, output.shape, output.copied) == ("torch.Tensor", "float32", (70, 50), True)
    assert output.stride == (x + y).stride()
    assert not output.aliases_input


@pytest.mark.slow
def test_a_compiled_entry_gives_the_same_values_on_every_signature(shop, arena):
    source = "import torch\ndef kernel_fn(x, y):\n    return torch.softmax(y * 2, -1), x + 1\n"
    with shop.open(source, arena, execution=Execution.COMPILE) as worker:
        worker.load(60)
        for rows in (4, 9, 4):
            x, y = torch.randn(rows, 8), torch.randn(rows, 16)
            slots = [arena.reserve(y.shape, y.dtype), arena.reserve(x.shape, x.dtype)]
            worker.call([arena.place(x), arena.place(y)], {}, slots, 200)
            torch.testing.assert_close(arena.tensor(slots[0]), torch.softmax(y * 2, -1))
            torch.testing.assert_close(arena.tensor(slots[1]), x + 1)


def test_constants_arrive_by_name_or_by_place(shop, arena):
    x = torch.randn(9)
    _, (named,) = run(shop, arena, SCALED, x, constants={"factor": 3.0, "shift": -1.5})
    assert torch.equal(named, x * 3.0 - 1.5)
    slot, out = arena.place(x), arena.reserve(x.shape, x.dtype)
    with shop.open("def kernel_fn(x, factor, shift):\n    return x * factor + shift\n", arena) as worker:
        worker.load(10)
        worker.call([slot], {}, [out], 10, positional=(2.0, float("inf")))
    assert arena.tensor(out).isinf().all()


def test_multi_threaded_operations_do_not_hang_in_a_forked_worker(arena):
    x = torch.randn(2000, 2000)
    with Workshop("cpu", threads=2) as shop:
        _, (result,) = run(shop, arena, "def kernel_fn(x):\n    return (x.exp() @ x).relu()\n", x, timeout_s=30)
    torch.testing.assert_close(result, (x.exp() @ x).relu(), rtol=1e-3, atol=1e-2)


def test_tuples_other_types_and_odd_outputs_are_reported_as_they_are(shop, arena):
    source = "def kernel_fn(x):\n    return x.sum(0), x[1:], x.double().t(), [x], None\n"
    x = torch.randn(4, 3)
    shapes = [torch.empty(3), torch.empty(3, 3), torch.empty(3, 4, dtype=torch.float64)]
    report, (total, tail, turned) = run(shop, arena, source, x, outputs=shapes)
    assert report.count == 5
    assert torch.equal(total, x.sum(0))
    assert torch.equal(tail, x[1:])
    assert torch.equal(turned, x.double().t())
    assert [output.aliases_input for output in report.outputs] == [False, True, False, False, False]
    assert report.outputs[1].storage_offset == 3
    assert [output.type_name for output in report.outputs[3:]] == ["builtins.list", "builtins.NoneType"]


def test_an_output_that_is_larger_than_its_slot_is_not_copied(shop, arena):
    report, (slot,) = run(shop, arena, "def kernel_fn(x):\n    return x.repeat(100)\n", torch.ones(8))
    assert not report.outputs[0].copied
    assert report.outputs[0].shape == (800,)
    assert slot.isnan().all()


def test_a_tensor_subclass_is_named_and_not_copied(shop, arena):
    source = (
        "import torch\nclass Lazy(torch.Tensor):\n    pass\ndef kernel_fn(x):\n    return (x + 1).as_subclass(Lazy)\n"
    )
    report, (slot,) = run(shop, arena, source, torch.ones(8))
    assert report.outputs[0].type_name.endswith(".Lazy")
    assert not report.outputs[0].copied
    assert slot.isnan().all()


def test_timed_runs_use_the_contents_of_the_moment_and_can_be_collected(shop, arena):
    x = torch.randn(64, 64)
    slots = [arena.place(x), arena.place(x + 1)]
    out = arena.reserve(x.shape, x.dtype)
    with shop.open("def kernel_fn(x):\n    return x * 2\n", arena) as worker:
        worker.load(10)
        assert not worker.prepare([PreparedCall((slot,)) for slot in slots], 10).graphed
        arena.tensor(slots[1]).copy_(x - 5)
        sample = worker.time(3, 10)
        worker.collect(1, [out])
    assert sample.seconds > 0
    assert sample.device_seconds is None
    assert torch.equal(arena.tensor(out), (x - 5) * 2)


def test_prepacked_weights_replace_the_slots_they_were_made_from(shop, arena):
    source = """
def prepack(weight, bias):
    return weight.t().contiguous(), bias * 2
def kernel_fn(x, weight, bias):
    assert weight.is_contiguous()
    return x @ weight + bias
"""
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    slots, out = [arena.place(tensor) for tensor in (x, weight, bias)], arena.reserve((3, 5), "float32")
    with shop.open(source, arena) as worker:
        worker.load(10)
        assert worker.prepack(slots[1:], 10) > 0
        worker.call(slots, {}, [out], 10)
    torch.testing.assert_close(arena.tensor(out), x @ weight.t() + bias * 2)
    with shop.open(ADD, arena) as worker:
        worker.load(10)
        assert worker.prepack(slots[1:], 10) is None


def test_a_prepack_that_returns_too_little_is_the_kernels_error(shop, arena):
    source = "def prepack(a, b):\n    return a\ndef kernel_fn(x, a, b):\n    return x\n"
    slots = [arena.place(torch.ones(2)) for _ in range(2)]
    with shop.open(source, arena) as worker:
        worker.load(10)
        with pytest.raises(KernelRaised, match="one tensor for each of its 2 weights"):
            worker.prepack(slots, 10)


def test_a_timed_run_takes_as_long_as_its_repeats(shop, arena):
    source = "import time\ndef kernel_fn(x):\n    time.sleep(0.02)\n    return x + 1\n"
    with shop.open(source, arena) as worker:
        worker.load(10)
        worker.prepare([PreparedCall((arena.place(torch.ones(2)),))], 10)
        assert worker.time(5, 10).seconds >= 0.1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("raise KeyError('missing')\n", "KeyError"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("def kernel_fn(x:\n", "SyntaxError"),
        ("x = 1\n", "AttributeError"),
        ("def kernel_fn(x):\n    return kernel_fn(x)\n", "RecursionError"),
        ("def kernel_fn(x):\n    raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\ndef kernel_fn(x):\n    raise E\n", "E"),
    ],
)
def test_what_a_kernel_raises_is_told_with_its_type(shop, arena, source, name):
    with pytest.raises(KernelRaised) as caught:
        run(shop, arena, source, torch.ones(2))
    assert caught.value.type_name == name


def test_a_raised_error_carries_the_line_of_the_kernel_file(shop, arena):
    with pytest.raises(KernelRaised, match="too small: 2") as caught:
        run(shop, arena, "def kernel_fn(x):\n    raise ValueError(f'too small: {x.numel()}')\n", torch.ones(2))
    assert "raise ValueError(f'too small" in caught.value.trace


def test_a_kernel_may_raise_and_be_called_again(shop, arena):
    source = "def kernel_fn(x, flag):\n    if flag: raise ValueError\n    return x + 1\n"
    x = torch.ones(2)
    with shop.open(source, arena) as worker:
        worker.load(10)
        slot, out = arena.place(x), arena.reserve(x.shape, x.dtype)
        with pytest.raises(KernelRaised):
            worker.call([slot], {"flag": True}, [out], 10)
        worker.call([slot], {"flag": False}, [out], 10)
    assert torch.equal(arena.tensor(out), x + 1)


@pytest.mark.parametrize("when", ["import", "call"])
def test_an_early_exit_with_code_0_is_a_death(shop, arena, when):
    body = "import os\n" + ("os._exit(0)\n" if when == "import" else "def kernel_fn(x):\n    os._exit(0)\n")
    with pytest.raises(WorkerDied, match="exited with code 0") as caught:
        run(shop, arena, body, torch.ones(2))
    assert caught.value.exit_code == 0
    assert_healthy(shop, arena)


def test_a_segmentation_fault_is_told_by_its_signal(shop, arena):
    source = "import ctypes\ndef kernel_fn(x):\n    ctypes.string_at(0)\n"
    with pytest.raises(WorkerDied, match="SIGSEGV") as caught:
        run(shop, arena, source, torch.ones(2))
    assert caught.value.signal == 11
    assert_healthy(shop, arena)


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass\n",
        "def kernel_fn(x):\n    while True: pass\n",
        "import subprocess\ndef kernel_fn(x):\n    subprocess.run(['sleep', '300'])\n",
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ndef kernel_fn(x):\n    while True: time.sleep(1)\n",
    ],
)
def test_a_hang_is_killed_within_its_time_with_all_its_children(shop, arena, source):
    begin = time.monotonic()
    with pytest.raises(WorkerTimeout):
        run(shop, arena, source, torch.ones(2), timeout_s=0.7)
    assert time.monotonic() - begin < 5
    assert not leftovers()
    assert_healthy(shop, arena)


def test_a_detached_grandchild_dies_with_its_worker(shop, arena):
    source = """
import os, time
def kernel_fn(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.1)
        os._exit(0)
    os.wait()
    return x + 1
"""
    slot, out = arena.place(torch.ones(2)), arena.reserve((2,), "float32")
    with shop.open(source, arena) as worker:
        worker.load(10)
        worker.call([slot], {}, [out], 10)
        assert worker.census().processes >= 2
    assert not leftovers()
    assert_healthy(shop, arena)


def test_a_fork_bomb_costs_one_worker(shop, arena):
    source = "import os\ndef kernel_fn(x):\n    while True: os.fork()\n"
    with pytest.raises((WorkerDied, WorkerTimeout, KernelRaised, WorkerOutOfMemory)):
        run(shop, arena, source, torch.ones(2), timeout_s=10)
    assert not leftovers()
    assert_healthy(shop, arena)


def test_allocating_100_gb_costs_one_worker(shop, arena):
    source = "import torch\ndef kernel_fn(x):\n    keep = [torch.ones(1 << 26) for _ in range(400)]\n    return x\n"
    with pytest.raises(WorkerOutOfMemory):
        run(shop, arena, source, torch.ones(2), timeout_s=60)
    assert_healthy(shop, arena)


def test_printing_5_gb_fills_no_disk_and_blocks_nobody(shop, arena):
    source = "line = 'x' * (1 << 20)\ndef kernel_fn(x):\n    for _ in range(5000): print(line)\n    return x + 1\n"
    with pytest.raises(WorkerDied, match="printed more than it may"):
        run(shop, arena, source, torch.ones(2), timeout_s=60)
    assert_healthy(shop, arena)


def test_a_long_log_keeps_its_head_and_its_tail(shop, arena):
    source = """
def kernel_fn(x):
    print('first words')
    for i in range(100000): print('line', i)
    print('last words')
    return x + 1
"""
    slot, out = arena.place(torch.ones(2)), arena.reserve((2,), "float32")
    with shop.open(source, arena) as worker:
        worker.load(10)
        worker.call([slot], {}, [out], 30)
    assert worker.log.startswith("first words")
    assert worker.log.rstrip().endswith("last words")
    assert "bytes left out" in worker.log
    assert len(worker.log) < 300_000


def test_a_forged_frame_is_a_death_and_never_an_answer(shop, arena):
    source = (
        "import os\ndef kernel_fn(x):\n    os.write(3, b'\\xff\\xff\\xff\\xff' + b'accepted' * 100)\n    return x\n"
    )
    with pytest.raises(WorkerDied, match="not an answer"):
        run(shop, arena, source, torch.ones(2))
    assert_healthy(shop, arena)


def test_a_worker_forked_ahead_serves_the_next_candidate_unless_it_has_died(shop, arena):
    shop.prepare_next()
    spare = shop._spare
    with shop.open(ADD, arena) as worker:
        assert worker is spare
    assert shop._spare is None
    shop.prepare_next()
    psutil.Process(shop._spare._guard).kill()
    time.sleep(0.2)
    assert_healthy(shop, arena)


def test_a_paused_worker_does_nothing_until_it_is_resumed(shop, arena):
    source = """
import threading, time
ticks = [0]
def count():
    while True:
        ticks[0] += 1
        time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
def kernel_fn(x):
    return x + ticks[0]
"""
    slot, out = arena.place(torch.zeros(1)), arena.reserve((1,), "float32")

    def ticks(worker):
        worker.call([slot], {}, [out], 10)
        return arena.tensor(out).item()

    with shop.open(source, arena) as worker:
        worker.load(10)
        assert worker.census().threads >= 2
        before = ticks(worker)
        time.sleep(0.3)
        running = ticks(worker) - before
        before = ticks(worker)
        worker.pause()
        time.sleep(0.3)
        worker.resume()
        assert running > 20
        assert ticks(worker) - before < running / 2
        worker.pause()
        with pytest.raises(WorkerTimeout):
            worker.call([slot], {}, [out], 0.3)
    assert not leftovers()


def test_an_answer_written_ahead_of_its_question_is_a_death(shop, arena):
    source = """
import json, os, struct
def kernel_fn(x):
    for _ in range(3):
        answer = json.dumps({"outputs": [], "count": 1, "structure": "Tensor", "device_seconds": 1e-9}).encode()
        os.write(3, struct.pack(">I", len(answer)) + answer)
    return x + 1
"""
    with pytest.raises(WorkerDied, match="not asked"):
        run(shop, arena, source, torch.ones(2))
    assert_healthy(shop, arena)


def test_a_killed_judge_takes_its_warm_parent_workers_and_folder_with_it(tmp_path):
    program = """
import sys, time, torch
from harness.arena import Arena
from harness.workshop import Workshop
shop, arena = Workshop("cpu"), Arena("cpu", 1 << 20)
source = "import subprocess; subprocess.Popen(['sleep', '300'])"
worker = shop.open(source + "\\ndef kernel_fn(x):\\n    while True: pass", arena)
worker.load(20)
print(shop._warm.pid, worker._guard, shop._folder, flush=True)
worker.call([arena.place(torch.ones(1))], {}, [], 300)
"""
    judge = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    warm, guard, folder = judge.stdout.readline().split()
    below = [process.pid for process in psutil.Process(int(guard)).children(recursive=True)]
    assert len(below) == 2
    judge.kill()
    judge.wait()
    judge.stdout.close()
    deadline = time.monotonic() + 10
    gone = [int(warm), int(guard), *below]
    while time.monotonic() < deadline and (any(map(psutil.pid_exists, gone)) or Path(folder).exists()):
        time.sleep(0.05)
    assert not [pid for pid in gone if psutil.pid_exists(pid)]
    assert not Path(folder).exists()


def test_a_killed_warm_parent_is_started_again(arena):
    with Workshop("cpu", threads=1) as shop:
        assert_healthy(shop, arena)
        shop._warm.kill()
        shop._warm.wait()
        assert_healthy(shop, arena)


def test_workers_leave_no_descriptors_processes_or_folders_behind(shop, arena):
    assert_healthy(shop, arena)
    me = psutil.Process()
    before = me.num_fds(), len(me.children(recursive=True))
    for _ in range(10):
        assert_healthy(shop, arena)
    assert (me.num_fds(), len(me.children(recursive=True))) == before
    assert [path.name for path in shop._folder.iterdir()] == ["warm.log"]


def test_closing_a_workshop_ends_its_processes_and_removes_its_folder(arena):
    shop = Workshop("cpu")
    pid, folder = shop._warm.pid, Path(shop._folder)
    with shop.open(ADD, arena):
        pass
    shop.close()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def leftovers() -> list[psutil.Process]:
    """Processes that came from a worker and are still there."""
    return [process for process in psutil.Process().children(recursive=True) if "overnight" in process.name()]


LEAVES_TRACES = """
import os, pathlib
def kernel_fn(x):
    triton = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
    found = sorted(str(p.relative_to(triton)) for p in triton.rglob("*"))
    print("found", found, flush=True)
    if not found:
        (triton / "abc").mkdir()
        (triton / "abc" / "code.cubin").write_bytes(b"compiled")
        (triton / "abc" / "program").write_bytes(b"#!")
        (triton / "abc" / "program").chmod(0o755)
        (triton / "link").symlink_to("/etc/passwd")
        (triton / "folder").symlink_to("/etc")
        os.mkfifo(triton / "pipe")
        tmp = pathlib.Path(os.environ["TMPDIR"])
        tmp.rmdir()
        tmp.symlink_to("/etc")
    return x + 1
"""


def test_what_a_worker_compiled_is_there_for_the_next_one_and_no_link_is_followed(shop, arena):
    seed = shop.seed_folder()
    arena.reset()
    x = torch.zeros(4)
    slots = [arena.place(x)], [arena.reserve(x.shape, x.dtype)]
    with shop.open(LEAVES_TRACES, arena) as first:
        first.load(60)
        first.call(slots[0], {}, slots[1], 60)
        first.harvest(seed)
        first.call(slots[0], {}, slots[1], 60)
    taken = sorted(str(path.relative_to(seed)) for path in seed.rglob("*") if not path.is_dir())
    assert taken == ["triton/abc/code.cubin", "triton/abc/program"]
    assert (seed / "triton/abc/program").stat().st_mode & 0o100
    with shop.open(LEAVES_TRACES, arena, seed=seed) as second:
        second.load(60)
        second.call(slots[0], {}, slots[1], 60)
        assert "found ['abc', 'abc/code.cubin', 'abc/program']" in second.log


def test_what_is_harvested_has_a_limit(tmp_path):
    scratch, into = tmp_path / "scratch", tmp_path / "into"
    (scratch / "triton").mkdir(parents=True)
    for number in range(MOST_FILES + 50):
        (scratch / "triton" / str(number)).write_bytes(b"x")
    with (scratch / "tmp_huge").open("wb") as huge:
        huge.truncate(MOST_BYTES + 1)
    (scratch / "tmp").mkdir()
    (scratch / "tmp_huge").rename(scratch / "tmp" / "huge")
    opened = open_below(str(tmp_path), ("scratch",))
    assert opened is not None
    harvest(opened, into)
    assert not (into / "tmp" / "huge").exists()
    assert sum(1 for path in into.rglob("*") if path.is_file()) <= MOST_FILES

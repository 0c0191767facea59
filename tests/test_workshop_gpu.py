"""Workers with a CUDA context inside the whole sandbox: memory shared by IPC, graphs, faults, and memory given back."""

import statistics
import time

import pytest
import torch

from harness.arena import Arena, Sharing
from harness.workshop import (
    Execution,
    KernelRaised,
    PreparedCall,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
    Workshop,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ADD = "def kernel_fn(x, y):\n    return x + y\n"
SOFTMAX = "import torch\ndef kernel_fn(x):\n    return torch.softmax(x, -1)\n"
TRITON = """
import torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

def kernel_fn(x, y):
    out = torch.empty_like(x)
    add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out
"""
NVCC = r'''
import ctypes, subprocess, torch
open("k.cu", "w").write("""
__global__ void add(const float* x, const float* y, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
extern "C" void launch(const float* x, const float* y, float* out, int n, void* stream) {
  add<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(x, y, out, n);
}
""")
subprocess.run(["nvcc", "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "k.cu", "-o", "k.so"], check=True)
launch = ctypes.CDLL("./k.so").launch

def kernel_fn(x, y):
    out = torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, out)]
    launch(*pointers, x.numel(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    return out
'''


@pytest.fixture(scope="module")
def shop():
    with Workshop("cuda:0") as opened:
        yield opened


@pytest.fixture(scope="module")
def arena():
    made = Arena("cuda:0", 512 << 20)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _fresh(request):
    if "arena" in request.fixturenames:
        request.getfixturevalue("arena").reset()


def run(shop, arena, source, *tensors, execution=Execution.PLAIN, timeout_s=120.0):
    inputs, out = [arena.place(tensor) for tensor in tensors], arena.reserve(tensors[0].shape, tensors[0].dtype)
    with shop.open(source, arena, execution=execution) as worker:
        worker.load(timeout_s)
        report = worker.call(inputs, {}, [out], timeout_s)
    return report, arena.tensor(out).clone()


def assert_healthy(shop, arena):
    x, y = torch.randn(2, 1 << 20, device="cuda")
    _, result = run(shop, arena, ADD, x, y)
    assert torch.equal(result, x + y)


def test_every_layer_of_the_sandbox_holds_with_cuda(shop):
    print(shop.layers)
    assert not [layer for layer in shop.layers if "missing" in layer]


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.OP, Execution.COMPILE])
def test_a_library_kernel_computes_on_the_judges_device_memory(shop, arena, execution):
    x, y = torch.randn(512, 300, device="cuda").t(), torch.randn(300, 512, device="cuda")
    report, result = run(shop, arena, ADD, x, y, execution=execution)
    torch.testing.assert_close(result, x + y)
    assert report.outputs[0].device == "cuda"
    assert not report.outputs[0].aliases_input


@pytest.mark.parametrize("source", [TRITON, NVCC], ids=["triton", "nvcc"])
def test_an_authored_kernel_is_built_and_run_inside_the_sandbox(shop, arena, source):
    x, y = torch.randn(2, 1 << 20, device="cuda")
    _, result = run(shop, arena, source, x, y)
    assert torch.equal(result, x + y)


@pytest.mark.parametrize("sharing", list(Sharing))
def test_either_way_of_sharing_device_memory_crosses_the_sandbox(shop, sharing):
    shared = Arena("cuda:0", 64 << 20, sharing)
    assert_healthy(shop, shared)
    shared.close()


def test_digests_and_poison_work_on_the_device(arena):
    slot = arena.place(torch.zeros(1000, 1001, device="cuda", dtype=torch.float16)[:, ::2])
    before = arena.digest(slot)
    assert arena.digest(slot) == before
    arena.tensor(slot)[999, 500] = 1e-7
    assert arena.digest(slot) != before
    arena.poison(slot)
    assert arena.tensor(slot).isnan().all()


def test_prepared_calls_become_one_graph_that_reads_the_contents_of_the_moment(shop, arena):
    x = torch.randn(1024, 1024, device="cuda")
    slots, out = [arena.place(x), arena.place(x + 1)], arena.reserve(x.shape, x.dtype)
    with shop.open(SOFTMAX, arena) as worker:
        worker.load(60)
        prepared = worker.prepare([PreparedCall((slot,)) for slot in slots], 60)
        assert prepared.graphed, prepared.reason
        fresh = torch.randn(1024, 1024, device="cuda")
        arena.tensor(slots[1]).copy_(fresh)
        sample = worker.time(5, 60, flush=True)
        worker.collect(1, [out])
    assert 0 < sample.device_seconds < sample.seconds
    torch.testing.assert_close(arena.tensor(out), torch.softmax(fresh, -1))


def test_an_unjoined_side_stream_cannot_hide_its_work(shop, arena):
    source = """
import torch
side = torch.cuda.Stream()
def kernel_fn(x):
    with torch.cuda.stream(side):
        for _ in range(20): y = x @ x
    return y
"""
    x = torch.randn(4096, 4096, device="cuda")
    slot = arena.place(x)
    with shop.open(source, arena) as worker:
        worker.load(60)
        prepared = worker.prepare([PreparedCall((slot,))], 60)
        sample = worker.time(3, 60)
    assert not prepared.graphed
    assert sample.device_seconds > 0.5 * sample.seconds


def test_a_kernel_that_cannot_be_captured_is_timed_launch_by_launch(shop, arena):
    source = "import torch\ndef kernel_fn(x):\n    if x.sum().item() > 1e9: return x\n    return x + 1\n"
    x, out = torch.randn(1000, device="cuda"), arena.reserve((1000,), "float32")
    slot = arena.place(x)
    with shop.open(source, arena) as worker:
        worker.load(60)
        prepared = worker.prepare([PreparedCall((slot,))], 60)
        assert not prepared.graphed
        assert prepared.reason
        assert worker.time(3, 60).device_seconds > 0
        worker.collect(0, [out])
    assert torch.equal(arena.tensor(out), x + 1)


def test_an_out_of_bounds_write_costs_one_worker(shop, arena):
    source = TRITON.replace("tl.store(out + at,", "tl.store(out + (1 << 40) + at,")
    x, y = torch.randn(2, 1 << 20, device="cuda")
    with pytest.raises((KernelRaised, WorkerDied)):
        run(shop, arena, source, x, y)
    assert_healthy(shop, arena)


def test_a_kernel_that_spins_on_the_device_is_killed_and_the_device_is_free_again(shop, arena):
    source = TRITON.replace(
        "    at = tl.program_id",
        "    while tl.load(x) == tl.load(x):\n        tl.debug_barrier()\n    at = tl.program_id",
    ).replace('@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])\n', "")
    source = source.replace('(triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())', "(1,)](x, y, out, 8, 8)")
    x, y = torch.randn(2, 1 << 20, device="cuda")
    begin = time.monotonic()
    with pytest.raises(WorkerTimeout):
        run(shop, arena, source, x, y, timeout_s=8)
    assert time.monotonic() - begin < 20
    assert_healthy(shop, arena)


def test_taking_all_device_memory_costs_one_worker_and_gives_it_back(shop, arena):
    source = """
import torch
keep = []
def kernel_fn(x, y):
    while True: keep.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))
"""
    torch.cuda.empty_cache()
    assert_healthy(shop, arena)
    before = torch.cuda.mem_get_info()[0]
    x, y = torch.randn(2, 1 << 10, device="cuda")
    with pytest.raises(WorkerOutOfMemory):
        run(shop, arena, source, x, y)
    assert torch.cuda.mem_get_info()[0] > before - (64 << 20)
    assert_healthy(shop, arena)


def test_a_killed_worker_leaves_no_device_memory_behind(shop, arena):
    assert_healthy(shop, arena)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        with pytest.raises(WorkerDied):
            run(shop, arena, "import os\ndef kernel_fn(x):\n    os._exit(0)\n", torch.ones(8, device="cuda"))
    assert torch.cuda.mem_get_info()[0] > before - (64 << 20)


def test_the_arenas_memory_is_all_that_a_worker_can_reach_of_the_judge(shop, arena):
    slot = arena.place(torch.ones(8, device="cuda"))
    assert slot.offset + slot.nbytes <= arena.nbytes
    assert arena.nbytes % (2 << 20) == 0


def test_identical_kernels_in_two_workers_take_the_same_time(shop, arena):
    slots = [arena.place(torch.randn(4096, 4096, device="cuda").half()) for _ in range(8)]
    calls = [PreparedCall((slot,)) for slot in slots]
    with shop.open(SOFTMAX, arena) as a, shop.open(SOFTMAX, arena) as b:
        for worker in (a, b):
            worker.load(60)
            assert worker.prepare(calls, 60).graphed
        ratios = []
        for _ in range(8):
            times = [worker.time(10, 60, flush=True).device_seconds for worker in (a, b, b, a)]
            ratios.append((times[1] + times[2]) / (times[0] + times[3]))
    assert 0.99 < statistics.median(ratios) < 1.01


def test_a_worker_forked_ahead_answers_at_once(shop, arena):
    shop.prepare_next()
    x = torch.randn(8, device="cuda")
    slot, out = arena.place(x), arena.reserve(x.shape, x.dtype)
    with shop.open("def kernel_fn(x):\n    return x * 2\n", arena) as worker:
        worker.load(10)
        worker.call([slot], {}, [out], 10)
    assert torch.equal(arena.tensor(out), x * 2)

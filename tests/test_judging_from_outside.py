"""What the judge sees of a worker without asking: memory, busy threads, linked functions; values no cache knows."""

import ctypes
import subprocess
import sys
import time

import pytest
import torch

from harness import process_memory
from harness.answers import addresses, device_seconds, number, text
from harness.census import busy_seconds, tree_of
from harness.compare import roughly_equal
from harness.errors import InputError
from harness.fresh_values import LEAST, FreshValues
from harness.linked_symbols import undefined_symbols
from harness.problem import named_problem
from harness.room import must_fit
from harness.specs.matmul import SPEC as MATMUL
from harness.worker.audit import authored, traced


def child(program):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_the_memory_of_a_child_is_read_as_it_is_now():
    program = (
        "import ctypes\nb = ctypes.create_string_buffer(b'night owl')\nprint(ctypes.addressof(b), flush=True)\ninput()"
    )
    with child(program) as process:
        address = int(process.stdout.readline())
        seen = process_memory.read(process.pid, address, 9)
        if seen is None:
            process.communicate("\n")
            pytest.skip("this machine forbids reading the memory of a child")
        assert bytes(seen.numpy()) == b"night owl"
        with pytest.raises(process_memory.NoSuchMemory):
            process_memory.read(process.pid, 8, 1)
        process.communicate("\n")


@pytest.mark.parametrize(("line", "busy"), [("while True: pass", True), ("import time; time.sleep(30)", False)])
def test_a_thread_that_never_rests_is_told_from_one_that_sleeps(line, busy):
    with child(f"print('up', flush=True)\n{line}") as process:
        process.stdout.readline()
        time.sleep(0.1)
        before = busy_seconds([process.pid])
        time.sleep(0.3)
        share = (busy_seconds([process.pid]) - before) / 0.3
        process.kill()
    assert (share > 0.5) is busy, share


def test_the_tree_of_a_process_holds_its_grandchildren():
    program = (
        "import subprocess, sys\n"
        "inner = 'import time; time.sleep(30)'\n"
        "p = subprocess.Popen([sys.executable, '-c', inner])\nprint(p.pid, flush=True)\ninput()\np.kill()\np.wait()"
    )
    with child(program) as process:
        grandchild = int(process.stdout.readline())
        assert grandchild in tree_of(process.pid)
        process.communicate("\n")


def test_functions_that_an_object_takes_from_others_are_read_from_its_file(tmp_path):
    (tmp_path / "k.cpp").write_text(
        '#include <dlfcn.h>\nextern "C" float cblas_sdot(int, const float*, int, const float*, int);\n'
        'extern "C" float own_gemm(const float* x) { dlopen("x", 1); return cblas_sdot(1, x, 1, x, 1); }\n'
    )
    done = subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "k.so", tmp_path / "k.cpp"], capture_output=True)
    assert done.returncode == 0, done.stderr
    found = undefined_symbols((tmp_path / "k.so").read_bytes())
    assert {"cblas_sdot", "dlopen"} <= found
    assert "own_gemm" not in found
    assert undefined_symbols(b"no object at all") == set()


def test_the_audit_names_arithmetic_and_not_the_making_of_memory():
    x = torch.randn(4, 4)
    with traced("", launches=False) as found:
        torch.empty_like(x).copy_(x.t())
    assert not found
    with traced("", launches=False) as found:
        getattr(torch.ops.aten, "_soft" + "max")(x, -1, False)
    assert found == {"aten::_softmax"}


def test_a_launch_is_a_files_own_only_by_the_name_of_a_function_in_it():
    source = "@triton.jit\ndef _softmax(x): ...\nCUDA = '__global__ void rows(const float* x) {}'\n"
    assert authored("_softmax", source)
    assert authored("rows(float const*)", source)
    assert not authored("void at::native::softmax<float>(float*)", source)
    assert not authored("sm90_xmma_gemm_f32", source + "def sm90_xmma_gemm_f32(): ...")
    assert not authored("_other", source)


@pytest.fixture
def fresh():
    x = torch.randn(12, 40)
    return FreshValues([(x, x[:1].expand(12, 40)), (torch.randn(12, 40), torch.randn(1, 40).expand(12, 40))])


def test_a_set_of_values_follows_from_its_key_and_can_be_made_again(fresh):
    first, again, other = fresh.again(7), fresh.again(7), fresh.again(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[1].stride() == (0, 1)


def test_what_was_summed_once_says_nothing_about_new_values():
    x = torch.ones(64, 256)
    values = FreshValues([(x,)]).again(3)[0]
    assert float(values.min()) >= LEAST
    assert float(values.max()) <= 1
    assert len(set(values.sum(-1).tolist())) > 60  # one factor for all would give equal sums


def test_fixed_arguments_keep_what_they_hold():
    table = torch.arange(6.0)
    fresh = FreshValues([(torch.randn(2, 6), table)], fixed=[1])
    assert torch.equal(fresh.again(1)[1], table)


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda y: y.roll(1, 0), lambda y: y * float("nan")])
def test_a_rough_look_tells_an_answer_from_none_and_from_an_old_one(wrong):
    own = torch.randn(32, 32)
    assert roughly_equal((own + 1e-6,), (own,))
    assert not roughly_equal((wrong(own),), (own,))


def test_what_a_worker_claims_is_made_harmless_or_refused():
    assert text("\x1b[2J\udc80 fine\n") == "?[2J? fine\n"
    assert number(float("nan")) is None
    assert number(10**400) is None
    with pytest.raises(ValueError, match="device time"):
        device_seconds(-1.0)
    with pytest.raises(ValueError, match="address"):
        addresses([[-5]])
    assert addresses([[ctypes.sizeof(ctypes.c_void_p)]]) == ((8,),)


def test_sizes_beyond_memory_are_refused_before_anything_is_allocated():
    with pytest.raises(InputError, match="GB"):
        must_fit(named_problem(MATMUL, "cpu", dtype="float32", shape={"M": 10**7, "N": 10**7, "K": 16}))
    must_fit(named_problem(MATMUL, "cpu", dtype="float32", shape={"M": 16, "N": 16, "K": 16}))

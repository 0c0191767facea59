"""What the compiler said of a kernel, read from a Triton cache and compared with NVIDIA's own tool."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from harness.compiled import CompiledKernel, compiled_kernels, resources

ROOT = Path(__file__).resolve().parent.parent
COMPILE = """
import sys
sys.path.insert(0, {folder!r})
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels_of_test import copy, spilling
for kernel, block in ((copy, 4096), (spilling, 16384)):
    names = kernel.arg_names
    signature = {{names[0]: "*fp16", names[1]: "*fp16", names[2]: "i32", "BLOCK": "constexpr"}}
    aligned = {{(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}}
    source = ASTSource(kernel, signature, constexprs={{"BLOCK": block}}, attrs=aligned)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 4}})
"""
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) + 1)

@triton.jit
def spilling(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at * 3, at < n, other=0.0).to(tl.float32)
    total = tl.sum(value, 0)
    again = tl.sum(tl.exp(value - total), 0)
    tl.store(y + at * 3, value * again + tl.exp(value - total), at < n)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernels_of_test.py").write_text(KERNELS)
    subprocess.run(
        [sys.executable, "-c", COMPILE.format(folder=str(folder))],
        env={"TRITON_CACHE_DIR": str(folder / "triton"), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        check=True,
        timeout=120,
    )
    return folder


def by_tool(cubin):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True, timeout=30).stdout
    return int(re.search(r"REG:(\d+)", said)[1]), int(re.search(r"STACK:(\d+)", said)[1])


def test_registers_and_spills_are_those_that_nvidias_tool_reads(cache):
    cubins = list(cache.rglob("*.cubin"))
    assert len(cubins) == 2
    for cubin in cubins:
        assert resources(cubin.read_bytes())[1:] == by_tool(cubin)


def test_a_kernel_is_told_in_a_sentence(cache):
    kernels = {one.name: one for one in compiled_kernels(cache)}
    copy, spilling = kernels["copy"], kernels["spilling"]
    assert copy.spilled_bytes == 0
    assert (copy.warps, copy.narrow) == (4, 0)
    assert copy.wide > 0
    assert "no spills" in copy.sentence()
    assert "16 bytes wide" in copy.sentence()
    assert spilling.spilled_bytes > 0
    assert "SPILLED" in spilling.sentence()
    assert "accesses are narrow" in spilling.sentence()


def test_occupancy_follows_registers_warps_and_shared_memory():
    assert CompiledKernel("k", 64, 0, 0, 16).blocks() == 2
    assert CompiledKernel("k", 32, 0, 0, 32).blocks() == 2
    assert CompiledKernel("k", 255, 0, 0, 4).blocks() == 2
    assert CompiledKernel("k", 32, 0, 100_000, 4).blocks() == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 4000, b"\x7fELF\x02\x01" + b"\0" * 4000, b"x" * 100],
)
def test_forged_files_are_left_out(tmp_path, content):
    (tmp_path / "k.cubin").write_bytes(content)
    (tmp_path / "k.json").write_text('{"shared": 1, "num_warps": 4}')
    assert compiled_kernels(tmp_path) == ()


def test_forged_numbers_and_names_are_left_out(cache, tmp_path):
    whole = next(cache.rglob("*.cubin")).read_bytes()
    for number, said in enumerate(("[" * 100_000, '{"shared": "a lot", "num_warps": 4}', "{}", "null")):
        (tmp_path / f"k{number}.cubin").write_bytes(whole)
        (tmp_path / f"k{number}.json").write_text(said)
    assert compiled_kernels(tmp_path) == ()

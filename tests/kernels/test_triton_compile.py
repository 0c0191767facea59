"""Every Triton kernel compiles, without a GPU, for Ampere, Hopper, MI300 and MI350; registers and spills are read."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_cases import CASES, KERNELS, Case, load

from harness.resources import Resources, of_amdgcn, of_cuobjdump

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


def compiled(case: Case, target: GPUTarget):
    kernel = getattr(load(case.file), case.kernel)
    types = case.signature.split()
    names = [name for name in kernel.arg_names if name not in case.constants]
    assert len(types) == len(names), f"{case.kernel} takes {names}"
    constants = case.constants | {name: 1 for name, kind in zip(names, types, strict=True) if kind == "1"}
    signature = dict.fromkeys(constants, "constexpr")
    signature |= {name: kind for name, kind in zip(names, types, strict=True) if kind != "1"}
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in zip(names, types, strict=True)
        if kind not in ("1", "fp32")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=target, options=options)


def resources(assembly, folder: Path) -> Resources:
    """What the kernel takes, as the compiler of its device says."""
    if "amdgcn" in assembly:
        return of_amdgcn(assembly["amdgcn"])
    file = folder / "kernel.cubin"
    file.write_bytes(assembly["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return of_cuobjdump(subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout)


def label(case: Case) -> str:
    return f"{case.file}-{case.kernel}-{case.signature.split()[0][1:]}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_kernel_compiles_for_hopper_without_spilling(case: Case, tmp_path: Path):
    cubin = compiled(case, TARGETS["sm_90"]).asm["cubin"]
    assert cubin[:4] == b"\x7fELF"
    assert resources({"cubin": cubin}, tmp_path).spilled_bytes == 0


# Their default tiles are the fastest on Hopper; elsewhere they spill, so that a sweep has to find others.
TILED_FOR_HOPPER = {"flash_attention", "flash_attention__masked", "fused_mlp", "linear_gelu", "matmul"}
# Attention takes LLVM seconds there.
ELSEWHERE = [pytest.param(c, marks=pytest.mark.slow) if c.file.startswith("flash_attention") else c for c in CASES]


@pytest.mark.parametrize("target", ["sm_80", "gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ELSEWHERE, ids=label)
def test_a_kernel_compiles_for_other_devices(case: Case, target: str, tmp_path: Path):
    assembly = compiled(case, TARGETS[target]).asm
    binary = assembly["cubin" if target.startswith("sm") else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    taken = resources(assembly, tmp_path)
    assert 0 < taken.registers <= (255 if target.startswith("sm") else 512)
    assert 0 < taken.occupancy <= taken.most
    if case.file not in TILED_FOR_HOPPER:
        assert taken.spilled_bytes == 0, taken.sentence


def test_every_triton_kernel_has_a_compile_case():
    covered = {(case.file, case.kernel) for case in CASES}
    launched = {
        (file.stem, name)
        for file in KERNELS.glob("*.py")
        for name in re.findall(r"^\s+(\w+)\[", file.read_text(), re.MULTILINE)
        if isinstance(getattr(load(file.stem), name, None), triton.runtime.JITFunction)
    }
    assert launched <= covered
    assert {file for file, _ in covered} == {file.stem for file in KERNELS.glob("*.py")}

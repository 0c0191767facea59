"""Every CUDA kernel file builds for Hopper with nvcc alone and spills no registers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "cuda"
FILES = sorted(KERNELS.glob("*.py"))
HOPPER, AMPERE = (9, 0), (8, 0)

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def load(file: Path):
    spec = importlib.util.spec_from_file_location(f"cuda_{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(file: Path, dtype: torch.dtype, capability: tuple[int, int], folder: Path) -> str:
    """What ptxas says about registers and spills; the build must succeed."""
    module = load(file)
    source = folder / "kernel.cu"
    source.write_text(module.SOURCE)
    build = [part for part in module.command(dtype, capability) if part != "-shared"]
    done = subprocess.run(
        [*build, "-cubin", "-Xptxas", "-v", source, "-o", folder / "kernel.cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_cuda_file_builds_into_a_library_with_its_entry(tmp_path: Path):
    script = (
        "import sys, torch; sys.path.insert(0, 'kernels/cuda'); import gelu;"
        "built = gelu.library(torch.bfloat16, (9, 0)); print(built.explain(0).decode(), bool(built.gelu))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.stdout == "no error True\n", done.stderr
    assert len(list(tmp_path.glob("overnight-cuda-*/*.so"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_cuda_file_builds_for_hopper_without_spilling(file: Path, dtype: torch.dtype, tmp_path: Path):
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report(file, dtype, HOPPER, tmp_path))
    assert found
    assert {int(spilled) for _, spilled in found} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_cuda_file_builds_for_ampere(file: Path, tmp_path: Path):
    assert "sm_80" in report(file, torch.float16, AMPERE, tmp_path)

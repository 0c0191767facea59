"""Every GPU kernel file is right in every dtype on the device: ragged, strided, empty and non-finite inputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("kernels/triton/*.py"), *ROOT.glob("kernels/cuda/*.py")])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_kernel_agrees_with_float64_in_every_dtype_and_shape(file: Path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_kernels.py", "--check-file", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []

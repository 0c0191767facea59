"""The fuser's Triton kernels without a GPU: cross-compiled for sm_90 and gfx942, and interpreted for their indexing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from playbook_targets import REGIONS

from agent.proposers.playbook.fuser import fuse_triton
from harness import wire

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("triton")


def answers_of(mode, regions, folder):
    jobs = [
        {
            "name": region.id,
            "target": wire.to_json(region),
            "source": fuse_triton(region),
            "sizes": [{symbol: 3 + n for n, symbol in enumerate(sorted(region.bindings[0]))}],
        }
        for region in regions
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "TRITON_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "playbook_triton_runner.py"), mode],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SAMPLED = ("add_rmsnorm_bf16", "gelu", "rope_half", "masked_softmax", "groupnorm_silu", "residual_chain")


def test_a_sample_of_the_generated_kernels_compiles_for_both_vendors(tmp_path):
    regions = [make() for make in REGIONS if make.__name__ in SAMPLED]
    assert answers_of("compile", regions, tmp_path) == dict.fromkeys(SAMPLED, "")


@pytest.mark.slow
def test_every_generated_kernel_compiles_for_both_vendors(tmp_path):
    regions = [make() for make in REGIONS]
    assert answers_of("compile", regions, tmp_path) == dict.fromkeys([region.id for region in regions], "")


def test_every_generated_kernel_computes_the_region_when_interpreted(tmp_path):
    regions = [make() for make in REGIONS]
    assert answers_of("interpret", regions, tmp_path) == dict.fromkeys([region.id for region in regions], "")

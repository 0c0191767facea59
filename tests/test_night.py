"""One real night, nothing scripted but the candidates: profile, judge, kill, resume, verify, on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from workspaces import ENVIRONMENT, git, make_workspace, record, rows, state_of

ROOT = Path(__file__).resolve().parent.parent
MODEL = '''import torch


class Net(torch.nn.Module):
    """RMSNorm written out, big enough to have headroom on any CPU."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 1024))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
'''
WRONG = "import torch\n\n\ndef kernel_fn(x, weight, **constants):\n    return torch.zeros_like(x)\n"
ALSO_WRONG = WRONG.replace("zeros_like(x)", "ones_like(x)")


def command(*arguments):
    return [sys.executable, "-P", "-m", "agent", *arguments]


def start(workspace, *arguments):
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    return subprocess.Popen(
        command(*arguments), cwd=workspace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(workspace, *arguments):
    process = start(workspace, *arguments)
    said, _ = process.communicate(timeout=500)
    return process.returncode, said


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_night_survives_a_kill_and_leaves_only_its_branch_and_its_rows(tmp_path):
    workspace = make_workspace(tmp_path / "w")
    (workspace / "net.py").write_text(MODEL)
    git(workspace, "add", "net.py")
    git(workspace, "commit", "-q", "-m", "Net")
    (workspace / "staged.txt").write_text("staged")
    git(workspace, "add", "staged.txt")
    record(workspace, "0001_any__zeros.py", WRONG)
    record(workspace, "0002_any__no_python.py", "def kernel_fn(x:\n")
    record(workspace, "0003_any__ones.py", ALSO_WRONG)
    before = state_of(workspace)

    options = ("--device", "cpu", "--input-shape", "2048,1024", "--proposer", "replay:recordings", "--experiments", "3")
    process = start(workspace, "run", "net.py:Net", *options)
    log = workspace / ".overnight/net/experiments/0001/log.txt"
    wait_for(lambda: (log.exists() and "stage" in log.read_text()) or process.poll() is not None, 300)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 2  # the judge and its warm parent at least
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below), 20)

    code, said = run(workspace, "resume")
    assert code == 0, said
    table = rows(workspace)
    assert [row["status"] for row in table] == ["interrupted", "incorrect", "crash", "incorrect"]
    assert [row["experiment"] for row in table] == ["1", "2", "3", "4"]
    assert git(workspace, "rev-parse", "overnight/net") == git(workspace, "rev-parse", "main")
    assert state_of(workspace) == before

    code, said = run(workspace, "verify", "net", "--mode", "compile", "--json")
    report = json.loads(said)
    assert code == 1  # nothing is kept, so nothing can be faster
    assert report["outputs_ok"]
    assert [mode["mode"] for mode in report["modes"] if mode["median_ms"]] == ["overnight", "eager", "compile"]

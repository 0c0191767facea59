"""Two thousand experiments: the supervisor's memory, descriptors and processes stay flat."""

import subprocess
import time

import psutil
import pytest
from workspaces import kernel, make_workspace, rows, start

EXPERIMENTS = 2000
SETTLED = 200
MEMORY_MB = 300


def sample(process):
    supervisor = psutil.Process(process.pid)
    return supervisor.memory_info().rss / 2**20, supervisor.num_fds(), len(supervisor.children(recursive=True))


def wait_for_rows(workspace, process, count):
    while process.poll() is None:
        path = workspace / "results.tsv"
        if path.exists() and path.read_bytes().count(b"\n") > count:
            return
        time.sleep(0.2)
    raise AssertionError(f"ended before experiment {count}")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_thousand_experiments_leave_the_supervisor_as_it_was(tmp_path):
    recordings = {
        f"{number:04d}_rmsnorm_a__x.py": kernel("keep 1.001" if number % 100 == 1 else "discard 1", name=str(number))
        + "# " + "x" * 5000
        for number in range(1, EXPERIMENTS + 1)
    }  # fmt: skip
    workspace = make_workspace(tmp_path, recordings=recordings)
    process = start(workspace, "run", output=subprocess.DEVNULL)
    wait_for_rows(workspace, process, SETTLED)
    _, descriptors, children = sample(process)
    wait_for_rows(workspace, process, EXPERIMENTS - 20)
    memory, descriptors_after, children_after = sample(process)
    assert process.wait(timeout=120) == 0
    assert len(rows(workspace)) == EXPERIMENTS
    assert memory < MEMORY_MB
    assert abs(descriptors_after - descriptors) <= 8
    assert abs(children_after - children) <= 3

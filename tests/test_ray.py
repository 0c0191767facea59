"""Judges on Ray: the verdicts of a local night, a killed worker costs one experiment, nothing stays behind."""

import os
import re
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from workspaces import drive, kernel, make_workspace, rows, start

from agent.devices import counted
from agent.errors import MachineError
from agent.executors.ray_cluster import Cluster, alike

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]
SCRIPTED = Path(__file__).resolve().parent / "scripted_harness.py"
RAY = ("--executor", "ray", "--devices", "cpu:0", "cpu:1")


OURS = rf"raylet|gcs_server|ray::|{re.escape(str(SCRIPTED))}"


def ray_processes(words=OURS):
    """Processes of any Ray cluster, and our own scripted judges."""
    listed = psutil.process_iter(["cmdline"])
    return [process for process in listed if re.search(words, " ".join(process.info["cmdline"] or ()))]


def gone(before):
    """Whether all that was started since has ended, within a moment."""
    until = time.monotonic() + 10
    known = {process.pid for process in before}
    while time.monotonic() < until:
        left = [one for one in ray_processes() if one.pid not in known and one.is_running()]
        if not left:
            return True
        time.sleep(0.1)
    return False


def test_a_night_on_ray_has_the_verdicts_of_a_local_one_and_leaves_no_process(tmp_path):
    before = ray_processes()
    some = {
        "0001_rmsnorm_a__x.py": kernel("keep 1.5"),
        "0002_softmax_b__y.py": kernel("incorrect", name="y"),
        "0003_softmax_b__z.py": kernel("discard 1.0", name="z"),
        "0004_rmsnorm_a__w.py": kernel("keep 1.3", "# model: 0.8", name="w"),
    }
    tables = {}
    for name, how in (("here", ("--devices", "cpu:0")), ("cluster", RAY)):
        workspace = make_workspace(tmp_path / name, recordings=some)
        said = drive(workspace, "run", *how)
        # the verdicts: which of two winners is proven in the model first, and so what the other one must add, is chance
        tables[name] = {
            row["description"].partition(":")[0]: (row["correctness"], row["ci_low"]) for row in rows(workspace)
        }
        assert (workspace / ".overnight/night/experiments/0001/verdict.json").exists()
    assert tables["here"] == tables["cluster"]
    assert "our fault" not in said
    assert gone(before)
    assert not (tmp_path / "cluster/.overnight/night/ray").exists()


@pytest.mark.slow
def test_a_killed_worker_costs_one_experiment_and_a_stop_ends_all(tmp_path):
    before = ray_processes()
    slow = {}
    for n in range(1, 9):
        name = f"000{n}_{'rmsnorm_a' if n % 2 else 'softmax_b'}__x{n}.py"
        slow[name] = kernel("discard 1", f"# slow: {1 if n < 7 else 60}", name=str(n))
    workspace = make_workspace(tmp_path, recordings=slow)
    process = start(workspace, "run", *RAY)
    known = {one.pid for one in before}
    victim, results = None, workspace / "results.tsv"
    while process.poll() is None and (not results.exists() or not rows(workspace)):
        time.sleep(0.05)
    while victim is None and process.poll() is None:
        found = [one for one in ray_processes("ray::Host.run") if one.pid not in known]
        victim = found[0] if found else None
        time.sleep(0.05)
    victim.kill()
    while process.poll() is None and len(rows(workspace)) < 6:
        time.sleep(0.05)
    time.sleep(1)
    began = time.monotonic()
    process.terminate()
    said, _ = process.communicate(timeout=30)
    took = time.monotonic() - began
    assert results.exists(), said
    statuses = [row["status"] for row in rows(workspace)]
    assert statuses.count("environment") == 1, said
    assert statuses.count("discard") == 5
    assert statuses.count("interrupted") == 2
    assert process.returncode == 0
    assert took < 8  # one second for the judges, the rest is Ray's own shutdown
    assert gone(before)


def test_only_devices_of_the_model_that_this_host_has_are_counted():
    def node(name, alive=True, **resources):
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    h200 = {"GPU": 8.0, "accelerator_type:H200": 1.0}
    nodes = [node("a", **h200), node("b", **h200), node("c", GPU=4.0, **{"accelerator_type:A100": 1.0}),
             node("d", alive=False, **h200)]  # fmt: skip
    assert alike(nodes, "a", "GPU") == (16, "H200")
    assert alike(nodes, "c", "GPU") == (4, "A100")
    assert alike([node("a", CPU=2.0), node("b", CPU=6.0)], "a", "CPU") == (8, None)
    assert alike([node("a", CPU=2.0)], "a", "GPU") == (0, None)


def test_a_cluster_that_lacks_what_is_asked_for_is_refused_at_start(tmp_path):
    before = ray_processes()
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__x.py": kernel()})
    said = drive(workspace, "run", "--executor", "ray", "--devices", *(f"cpu:{n}" for n in range(999)), check=False)
    assert "999 CPU" in said
    assert not (workspace / "results.tsv").exists()
    with pytest.raises(MachineError, match="2 GPUs are asked for, but the cluster has 0"):
        Cluster(counted(["cuda:0", "cuda:1"], "cuda"), "cuda")
    assert gone(before)
    assert list(Path(tempfile.gettempdir()).glob("overnight-code-*")) == []

"""Every cheat of the corpus is refused for the reason it names, every honest kernel is accepted; on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.judge import Judge, silent

sys.path.insert(0, str(Path(__file__).parent / "redteam"))

from corpus import specimens
from workspaces import ENVIRONMENT

from agent.redteam import Kind, Outcome, data, judged, read
from agent.verbs import scratch_folder

BENCHMARK_GUARDS = {"benchmark", "timed_outputs", "challenge_chain", "deferred_work"}
QUICK_HONEST = {"library_softmax", "declared_error_bound", "exact_matmul", "serial_sum"}
CHEATS = [s for s in specimens("cheats") if s.runs_on("cpu")]
HONEST = [s for s in specimens("honest") if s.runs_on("cpu")]
TRIES = 3
"""Which guard meets a cheat first is now and then decided by the secret draws; that it is refused is not."""
SLOW_CHEATS = {"hangs_in_call", "cpp_static_cache", "static_buffer", "ignores_strides", "needs_contiguous"}
SAMPLED = 4
"""`make test` judges each fourth of the cheats that need no clock, `make test-all` every one."""


def overnight(folder, *arguments):
    """`python -m agent` in a folder that is not ours."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-P", "-m", "agent", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.close()


def marked(specimen, *, slow):
    return pytest.param(specimen, id=specimen.name, marks=[pytest.mark.slow] if slow else [])


def is_slow(index, specimen):
    slow = specimen.slow or bool(BENCHMARK_GUARDS & set(specimen.expect))
    return slow or specimen.name in SLOW_CHEATS or index % SAMPLED > 0


@pytest.mark.parametrize("cheat", [marked(s, slow=is_slow(i, s)) for i, s in enumerate(CHEATS)])
def test_a_cheat_is_refused_for_the_reason_it_names(judge, cheat):
    outcomes = []
    while not (outcomes and outcomes[-1] is Outcome.RIGHT) and len(outcomes) < TRIES:
        bench = bool(BENCHMARK_GUARDS & set(cheat.expect))
        verdict = judge.judge(cheat.request("cpu", bench=bench), silent)
        outcomes.append(cheat.outcome(verdict))
    assert outcomes.count(Outcome.WRONG) <= bool(cheat.by_chance), f"{cheat.name} was accepted"
    said = f"expected {cheat.expect}, got {verdict.stage} / {verdict.guard}: {verdict.detail}"
    if outcomes[-1] is Outcome.UNDECIDED and verdict.guard == "unreliable":
        pytest.skip("this machine is too busy to time anything: " + verdict.detail)
    assert outcomes[-1] is Outcome.RIGHT, said
    assert verdict.blame == "candidate"


@pytest.mark.parametrize("kernel", [marked(s, slow=s.name not in QUICK_HONEST) for s in HONEST])
def test_an_honest_kernel_is_accepted(judge, kernel):
    verdict = judge.judge(kernel.request("cpu", bench=False), silent)
    assert verdict.accepted, f"{verdict.status} in {verdict.stage} ({verdict.guard}): {verdict.detail}"


def test_the_command_prints_both_error_counts_and_leaves_with_the_honest_yes(tmp_path):
    done = overnight(tmp_path, "redteam", "--device", "cpu", "--only", "first_rows_only")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["cheats accepted: 0 of 1", "honest kernels refused: 0 of 0"]


def test_the_command_says_which_files_there_are_none_of(tmp_path):
    done = overnight(tmp_path, "redteam", "--device", "cpu", "--only", "no-such-file")
    assert done.returncode == 2
    assert "no-such-file" in done.stderr


def test_repeated_trials_are_each_counted_and_told_in_json(tmp_path):
    done = overnight(tmp_path, "redteam", "--device", "cpu", "--only", "syntax_error", "--repeat", "2", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert (report["cheats"], report["cheats_accepted"], report["undecided"]) == (2, 0, 0)
    assert [trial["outcome"] for trial in report["trials"]] == ["right", "right"]


@pytest.mark.slow
def test_an_honest_kernel_among_the_cheats_is_reported_as_accepted(tmp_path):
    from agent.cli_options import harness_in

    path = tmp_path / "not_a_cheat.py"
    path.write_text("# expect: smoke\nimport torch\n\n\ndef kernel_fn(x):\n    return torch.softmax(x, dim=-1)\n")
    with scratch_folder() as folder:
        trials = list(judged(harness_in(folder), [read(Kind.CHEAT, path)], "cpu", bench=False))
    report = data(trials, "cpu")
    assert report["cheats_accepted"] == 1 or report["undecided"] == 1  # too busy to time
    assert trials[0].verdict is not None

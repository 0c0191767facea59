"""The playbook's order: structures, then sweeps, the same after a resume, and an end with a reason."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from playbook_targets import REGIONS, add_rmsnorm, attention, gelu, groupnorm_silu, node, rope_half, spec, target

from agent.proposers.playbook import Playbook
from agent.records import Attempt, Brief, Candidate, NothingLeft, RowStatus
from agent.search.settings import apply_setting, read_setting
from agent.search.sweep import PATIENCE
from harness import wire
from harness.records import StageName, StageResult, StageStatus, Status, Timing, Verdict

ROOT = Path(__file__).resolve().parents[1]
PLAYBOOK = Playbook(ROOT / "kernels")


def brief(region, attempts=(), device="cpu"):
    return Brief(
        target=region, device=device, device_name="", peaks={}, incumbent_source=None, incumbent_backend=None,
        attempts=tuple(attempts), program="",
    )  # fmt: skip


def verdict(candidate_us, status=Status.DISCARD):
    timing = Timing(
        eager_us=100.0, incumbent_us=60.0, candidate_us=candidate_us, speedup_vs_pytorch=100.0 / candidate_us,
        speedup_vs_best=60.0 / candidate_us, ci_low=1.0, ci_high=2.0, noise=0.01,
    )  # fmt: skip
    stages = {name: StageResult(StageStatus.PASS, 0.1) for name in StageName}
    return Verdict(
        accepted=True, status=status, target="t", device="cpu", stage=None, guard=None, detail="", blame=None,
        stages=stages, timing=timing, sandbox=(), kernel_sha256="",
    )  # fmt: skip


def attempt(number, candidate, candidate_us=50.0, status=RowStatus.DISCARD):
    judged = status in (RowStatus.KEEP, RowStatus.DISCARD)
    return Attempt(
        number=number, candidate_sha256="", source=candidate.source, backend=candidate.backend,
        tactic=candidate.tactic, description=candidate.description, status=status,
        verdict=verdict(candidate_us, Status.KEEP if status is RowStatus.KEEP else Status.DISCARD) if judged else None,
    )  # fmt: skip


def play(region, speeds, limit=60):
    """All proposals in order; `speeds` gives a candidate's time and row status from its tactic."""
    attempts = []
    while len(attempts) < limit:
        proposal = PLAYBOOK.propose(brief(region, attempts))
        if isinstance(proposal, NothingLeft):
            return attempts, proposal
        attempts.append(attempt(len(attempts) + 1, proposal, *speeds(proposal)))
    raise AssertionError("the playbook does not end")


def test_structures_come_before_sweeps_and_every_idea_comes_once():
    attempts, last = play(add_rmsnorm(), lambda _: (50.0,))
    tactics = [one.tactic for one in attempts]
    assert tactics[:2] == ["fuse cpp", "known cpp add_rmsnorm"]
    assert all(tactic.startswith("sweep ") for tactic in tactics[2:])
    assert len(set(tactics)) == len(tactics)
    assert "tried" in last.reason


def test_sweeps_stop_after_a_few_steps_without_a_win():
    attempts, _ = play(add_rmsnorm(), lambda _: (50.0,))
    swept = [one.tactic.partition(":")[0] for one in attempts if one.tactic.startswith("sweep ")]
    assert set(swept) == {"sweep fuse cpp", "sweep known cpp add_rmsnorm"}
    assert all(3 <= swept.count(structure) <= PATIENCE for structure in set(swept))


def test_a_won_sweep_step_is_the_next_base():
    def speeds(candidate):
        better = read_setting(candidate.source).current.get("VECTOR_BITS") == 256
        return (40.0, RowStatus.KEEP if better else RowStatus.DISCARD) if better else (50.0,)

    attempts, _ = play(add_rmsnorm(), speeds)
    won = next(number for number, one in enumerate(attempts) if "VECTOR_BITS=256" in one.tactic)
    assert all("VECTOR_BITS=256" in one.tactic for one in attempts[won : won + 3])


def test_a_hopelessly_slow_kernel_is_not_swept():
    attempts, _ = play(add_rmsnorm(), lambda _: (500.0,))
    assert [one.tactic for one in attempts] == ["fuse cpp", "known cpp add_rmsnorm"]


def test_the_fastest_structure_is_swept_first():
    attempts, _ = play(add_rmsnorm(), lambda one: (20.0 if "known" in one.tactic else 50.0,))
    assert attempts[2].tactic.startswith("sweep known cpp add_rmsnorm: ")


def test_a_resumed_session_goes_on_with_the_same_plan():
    attempts, _ = play(add_rmsnorm(), lambda _: (50.0,))
    for done in range(len(attempts)):
        proposal = Playbook(ROOT / "kernels").propose(brief(add_rmsnorm(), attempts[:done]))
        assert isinstance(proposal, Candidate)
        assert (proposal.tactic, proposal.source) == (attempts[done].tactic, attempts[done].source)


def test_an_interrupted_experiment_is_proposed_again():
    first = PLAYBOOK.propose(brief(add_rmsnorm()))
    cut_off = attempt(1, first, status=RowStatus.INTERRUPTED)
    assert PLAYBOOK.propose(brief(add_rmsnorm(), [cut_off])).source == first.source


def test_what_the_machine_spoilt_gets_one_second_chance_at_the_end():
    def speeds(candidate):
        return (50.0, RowStatus.ENVIRONMENT if candidate.tactic == "fuse cpp" else RowStatus.DISCARD)

    attempts, _ = play(add_rmsnorm(), speeds)
    assert [one.tactic for one in attempts].count("fuse cpp") == 2
    assert attempts[-1].tactic == "fuse cpp"


def test_a_target_that_nothing_fits_says_which_operation_is_unknown():
    x = spec("x", (2, 5, 96), ("B", "S", 96))
    region = target("unknown", "other", [x], [node("y", "cumsum", "x", "-1")], ["y"], [x])
    proposal = PLAYBOOK.propose(brief(region))
    assert isinstance(proposal, NothingLeft)
    assert "cumsum" in proposal.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [*REGIONS, attention], ids=lambda make: make.__name__)
def test_every_region_has_a_first_idea_whose_kernel_fn_has_the_targets_signature(make, device):
    region = make()
    proposal = PLAYBOOK.propose(brief(region, device=device))
    assert isinstance(proposal, Candidate)
    functions = [part for part in ast.parse(proposal.source).body if isinstance(part, ast.FunctionDef)]
    last = [part for part in functions if part.name == "kernel_fn"]
    assert len(last) == 1
    names = [argument.arg for argument in (*last[0].args.args, *last[0].args.kwonlyargs)]
    assert names == [item.name for item in region.inputs] + list(region.constants)


def test_the_agent_side_never_imports_torch():
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from test_playbook import PLAYBOOK, add_rmsnorm, brief\n"
        "PLAYBOOK.propose(brief(add_rmsnorm())); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(ROOT / "tests")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def ideas_of(region):
    attempts, _ = play(region, lambda _: (5000.0,))
    return attempts


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_known_and_library_kernels_compute_what_the_target_does(tmp_path):
    jobs = []
    regions = [add_rmsnorm(), gelu(), groupnorm_silu(), rope_half(), attention(), attention(boolean=True)]
    for number, region in enumerate(regions):
        sizes = [dict(region.bindings[0]), dict.fromkeys(region.bindings[0], 9)]
        for one in ideas_of(region):
            if not one.tactic.startswith("fuse"):
                name = f"{number} {one.tactic}".replace(" ", "_")
                jobs.append({"name": name, "target": wire.to_json(region), "source": one.source, "sizes": sizes})
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "playbook_runner.py")],
        input=json.dumps(jobs), capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) >= 8
    assert {name: answer for name, answer in answers.items() if not (isinstance(answer, float) and answer <= 1)} == {}


def test_a_setting_moves_to_the_front_and_reads_back():
    source = 'TUNABLES = {\n    "ROWS": [1, 4],\n    "TILE": [(64, 4), (128, 8)],\n}\nROWS = TUNABLES["ROWS"][0]\n'
    setting = read_setting(source)
    changed = apply_setting(source, setting.with_choice("TILE", (128, 8)))
    assert read_setting(changed).current == {"ROWS": 1, "TILE": (128, 8)}
    assert changed.endswith('ROWS = TUNABLES["ROWS"][0]\n')
    assert setting.changes(read_setting(changed)) == "TILE=(128, 8)"


def test_a_kernel_without_tunables_cannot_be_swept():
    assert read_setting("x = 1\n") is None
    assert read_setting("TUNABLES = make()\n") is None
    assert read_setting("def broken(") is None


def test_a_narrower_target_is_not_taken_for_the_known_operation():
    """(1 + weight) · x is no plain RMSNorm: whatever is proposed for it must not be the known kernel."""
    region = add_rmsnorm()
    graph = [*region.graph[:-1], node("one", "add", "w", "1.0"), node("y", "mul", "one", "t")]
    shifted = replace(region, kind="other", graph=tuple(graph))
    assert [one.tactic for one in ideas_of(shifted)] == ["fuse cpp"]

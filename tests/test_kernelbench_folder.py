"""A folder of KernelBench problems: the ModelNew files that are written, the figures over them, and going on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from workspaces import ENVIRONMENT, git

from agent.errors import InputError
from agent.kernelbench import Fate, Result, problem_files, resized, session_name, summary
from harness import wire
from harness.capture import capture
from harness.judge import Judge, silent
from harness.loading import load_model, load_module
from harness.model_new import model_new
from harness.records import JudgeRequest, KeptKernel, ModelSpec, VerifyRequest
from harness.targets import draft_targets, finish, observe

PROJECT = Path(__file__).resolve().parent.parent
PROBLEM = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.Dropout(0.5))
        self.table = torch.arange(64.0)

    def forward(self, x, y):
        z = x + y
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return self.layers(z) + self.table, z


rows = 24
width = 48


def get_inputs():
    return [torch.randn(rows, width), torch.randn(rows, width)]


def get_init_inputs():
    return [width]
"""
ZERO = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x.mean(1, keepdim=True) - x.amax(1, keepdim=True))


def get_inputs():
    return [torch.rand(64, 64)]


def get_init_inputs():
    return []
"""


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return path


def kept(path: Path, kind: str, folder: Path, change=lambda source: source) -> VerifyRequest:
    """The problem's region of that kind, its reference as the kernel."""
    spec = ModelSpec(str(path), device="cpu")
    found = capture(load_model(spec))
    drafts = [draft for draft in draft_targets(found) if draft.kind == kind]
    observe(found, drafts)
    target = finish(drafts[0], {0: 1})
    place = folder / f"{target.id}.json"
    place.write_text(wire.to_json(target))
    source = target.reference.replace("def reference", "def kernel_fn")
    return VerifyRequest(spec, (KeptKernel(str(place), change(source)),))


def test_a_written_model_calls_the_kernel_and_is_accepted_for_the_problem(problem, tmp_path):
    written = model_new(kept(problem, "add_rmsnorm", tmp_path))
    assert written.applied == {"add_rmsnorm_1": 1}, written.reason
    assert "kernel_add_rmsnorm_1(" in written.source.split("def _overnight_graph")[1]
    judge = Judge()
    try:
        verdict = judge.judge(JudgeRequest(str(problem), written.source, bench=False), silent)
        assert verdict.accepted, verdict.detail
        broken = written.source.replace("1e-05", "1e-03")
        assert broken != written.source
        assert not judge.judge(JudgeRequest(str(problem), broken, bench=False), silent).accepted
    finally:
        judge.close()


def test_a_written_model_is_the_original_in_train_mode_and_at_other_sizes(problem, tmp_path):
    request = kept(problem, "add_rmsnorm", tmp_path, lambda source: source.replace("return ", "return 2 * "))
    answer = tmp_path / "answer.py"
    answer.write_text(model_new(request).source)
    module = load_module(answer)
    torch.manual_seed(0)
    model, new = module.Model(48).eval(), module.ModelNew(48).eval()
    new.load_state_dict(model.state_dict())
    inputs, more = torch.randn(2, 24, 48), torch.randn(2, 5, 48)
    with torch.no_grad():
        torch.testing.assert_close(new(*inputs)[1], 2 * model(*inputs)[1])  # the kernel, which we made wrong
        torch.testing.assert_close(new(*more)[1], model(*more)[1])
        torch.testing.assert_close(new.train()(*inputs)[1], model(*inputs)[1])


def test_why_no_model_can_be_written_is_said(problem, tmp_path):
    request = kept(problem, "add_rmsnorm", tmp_path)
    problem.write_text(PROBLEM.replace("z = x + y\n", "z = x + y\n        torch._dynamo.graph_break()\n"))
    written = model_new(request)
    assert not written.source
    assert "2 graphs" in written.reason


def test_figures_count_problems_without_a_kernel_as_the_original():
    rows = [
        Result("a", Fate.SOLVED, "", 4.0, 1.6),
        Result("b", Fate.SOLVED, "", 0.5, 0.5),
        Result("c", Fate.NO_KERNEL),
        Result("d", Fate.DEGENERATE),
        Result("e", Fate.REFUSED, "", 9.0, 9.0),
    ]
    found = summary(rows)
    assert (found["problems"], found["judged"], found["solved"], found["degenerate"]) == (5, 4, 2, 1)
    assert found["vs_eager"]["fast_p"] == {"1": 0.25, "1.5": 0.25, "2": 0.25}
    assert found["vs_eager"]["geometric_mean"] == pytest.approx(2.0**0.25)
    assert found["vs_eager"]["median"] == 1.0
    assert found["vs_best_of_eager_and_compile"]["fast_p"]["2"] == 0.0
    assert summary([Result("d", Fate.DEGENERATE)])["vs_eager"]["median"] is None


def test_problems_come_in_natural_order_and_other_files_are_passed_over(tmp_path):
    for name in ("level1/10_B.py", "level1/2_A.py", "level2/1_C.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ZERO)
    (tmp_path / "answer.py").write_text(ZERO + "\nclass ModelNew(Model): pass\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    files = problem_files(tmp_path)
    assert [path.name for path in files] == ["2_A.py", "10_B.py", "1_C.py"]
    assert [session_name(tmp_path, path) for path in files] == ["kb-level1-2_a", "kb-level1-10_b", "kb-level2-1_c"]
    with pytest.raises(InputError, match="no KernelBench problem"):
        problem_files(PROJECT / "docs")
    with pytest.raises(InputError, match="is no folder"):
        problem_files(tmp_path / "nothing")


def test_sizes_at_the_top_of_a_file_are_changed_and_nothing_else():
    text = "rows = 24  # many\ncolumns = rows\nwidth=8\n\ndef f(rows=3):\n    rows = 5\n"
    changed = resized(text, {"rows": 2, "width": 1, "depth": 9})
    assert changed.splitlines()[0].split("#")[0].strip() == "rows = 2"
    assert "width = 1" in changed
    assert "    rows = 5" in changed
    assert "depth" not in changed


def overnight(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "agent" / "__main__.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, timeout=280)


def test_a_degenerate_folder_is_reported_once_and_not_judged_again(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems" / "1_Zero.py").write_text(ZERO)
    first = overnight(tmp_path, "kernelbench", "problems", "--device", "cpu", "--json")
    assert first.returncode == 1, first.stderr  # nothing there to optimise
    data = json.loads(first.stdout)
    assert data["degenerate"] == 1
    assert "constant" in data["results"][0]["detail"]
    again = overnight(tmp_path, "kernelbench", "problems", "--device", "cpu", "--json")
    assert json.loads(again.stdout) == data
    assert overnight(tmp_path, "kernelbench", "nothing").returncode == 2
    assert not git(tmp_path, "status", "--porcelain", "--", ".overnight")


@pytest.mark.slow
def test_a_folder_is_solved_and_its_answers_are_modules(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "config", "user.name", "Night Owl")
    git(tmp_path, "config", "user.email", "owl@example.org")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Start")
    (tmp_path / "problems").mkdir()
    large = PROBLEM.replace("rows = 24", "rows = 1024").replace("width = 48", "width = 1024")
    (tmp_path / "problems" / "1_Norm.py").write_text(large)
    done = overnight(tmp_path, "kernelbench", "problems", "--device", "cpu", "--experiments", "2", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["results"][0]
    assert row["fate"] in {"solved", "no_kernel"}
    if row["fate"] == "solved":
        assert "class ModelNew(Model)" in Path(row["model_new"]).read_text()

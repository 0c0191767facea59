"""A night with a language model that is scripted: statuses, costs, refusals, and nothing bought twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llm_server import Answer, LanguageModelServer, refusal
from workspaces import ENVIRONMENT, drive, git, kernel, make_workspace, rows, start

from agent.harness_client import child_environment

ROOT = Path(__file__).resolve().parent.parent
ONE_TARGET = {"targets": {"rmsnorm_a": 0.5}}
PRICED = "openai/gpt-4o-mini"  # $0.15 and $0.60 for a million tokens in litellm's map


def fenced(source):
    return f"HYPOTHESIS: fewer passes\nEXPECTED GAIN: 1.2x\n```python\n{source}```\n"


FAST = kernel("keep 1.5", name="fast")
TEN = [
    Answer("I would rather talk about the weather."),
    Answer(fenced(kernel("incorrect", name="wrong 1"))),
    Answer(fenced(kernel("incorrect", name="wrong 2"))),
    Answer(fenced(FAST)),
    Answer(fenced(kernel("incorrect", name="wrong 3"))),
    Answer(fenced(FAST)),
    Answer(fenced(kernel("keep 1.1", name="half")[:60]), finish="length"),
    Answer(fenced(kernel("cheat", name="cheat"))),
    Answer(fenced(kernel("discard 0.8", name="slower"))),
    Answer(fenced(kernel("keep 1.2", "# model: 0.8", name="faster"))),
]
STATUSES = [
    "invalid_reply", "incorrect", "incorrect", "keep", "incorrect", "duplicate", "invalid_reply", "cheat",
    "discard", "keep",
]  # fmt: skip
ONE_CALL_USD = 1000 * 0.15e-6 + 100 * 0.6e-6


def by_turn(answers, seen):
    """Answer by how many different prompts were asked: a prompt that is asked again gets its first answer again."""

    def script(body, _index):
        prompt = body["messages"][0]["content"]
        if prompt not in seen:
            seen.append(prompt)
        return answers[min(seen.index(prompt), len(answers) - 1)]

    return script


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "w", script=ONE_TARGET)


def asked(workspace, server, *arguments, verb="run", **named):
    flags = ("--proposer", "llm", "--llm", PRICED, "--api-base", server.url) if verb == "run" else ()
    return drive(workspace, verb, *flags, *arguments, **named)


def assert_ten(workspace, table, interrupted=0):
    assert [row["status"] for row in table if row["status"] != "interrupted"] == STATUSES
    assert [row["experiment"] for row in table] == [str(number) for number in range(1, len(table) + 1)]
    assert sum(int(row["tokens"]) for row in table) == 10 * 1100
    assert sum(float(row["cost_usd"]) for row in table) == pytest.approx(10 * ONE_CALL_USD)
    assert len(table) == 10 + interrupted
    assert git(workspace, "log", "--format=%s", "main..overnight/night").count("\n") == 1
    assert "faster" in git(workspace, "show", "overnight/night:kernels/library/rmsnorm_a.py")
    judged = (workspace / ".overnight/night/judged.txt").read_text().split()
    assert len(judged) == len(set(judged)) == 7


def test_ten_staged_candidates_get_the_right_statuses_and_their_costs_are_summed(workspace):
    with LanguageModelServer(TEN) as server:
        said = asked(workspace, server, "--experiments", "10")
        assert len(server.requests) == 10
        assert "no kernel_fn in the reply" in server.prompt(1)
    assert_ten(workspace, rows(workspace))
    assert "are sent to openai/gpt-4o-mini at http://127.0.0.1" in said
    folder = workspace / ".overnight/night/experiments/0004"
    assert (folder / "candidate.py").read_text() == FAST
    assert (folder / "reply.md").read_text() == fenced(FAST)
    assert "rmsnorm_a x2" in (folder / "prompt.md").read_text()
    usage = json.loads((folder / "usage.json").read_text())
    assert (usage["model"], usage["prompt_tokens"], usage["completion_tokens"]) == (PRICED, 1000, 100)
    assert usage["cost_usd"] == pytest.approx(ONE_CALL_USD)
    assert "fewer passes" in (workspace / ".overnight/night/learned.md").read_text()


@pytest.mark.parametrize(
    "moment", ["proposed:5", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("judged:4", "decided:6"))]
)
def test_the_same_after_a_kill_in_the_middle_and_a_resume_buys_nothing_twice(workspace, moment):
    with LanguageModelServer(TEN) as server:
        flags = ("--proposer", "llm", "--llm", PRICED, "--api-base", server.url, "--experiments", "10")
        process = start(workspace, "run", *flags, "--pause-at", moment)
        for line in process.stdout:
            if line.startswith("paused at"):
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        process.stdout.close()
        asked(workspace, server, verb="resume")
        assert len(server.requests) == 10
    assert_ten(workspace, rows(workspace), interrupted=int(moment == "proposed:5"))


def test_a_refused_key_stops_resumably_and_consumes_no_experiment(workspace):
    with LanguageModelServer([refusal(401, "Incorrect API key provided", "invalid_api_key")]) as server:
        said = asked(workspace, server, "--experiments", "2", check=False)
        assert len(server.requests) == 1
        assert said.endswith("exit 3")
        assert "Incorrect API key provided" in said
        assert "overnight resume night" in said
        assert not (workspace / "results.tsv").exists() or rows(workspace) == []
        server.script = [Answer(fenced(FAST))]
        asked(workspace, server, "--experiments", "1", verb="resume")
    assert [row["status"] for row in rows(workspace)] == ["keep"]


def test_a_key_reaches_the_server_and_no_file_child_or_message(workspace, monkeypatch):
    secret = "sk-night-0123456789abcdef"
    answers = [refusal(500, f"your key {secret} is fine, the server is not"), Answer(fenced(f"# {secret}\n{FAST}"))]
    with LanguageModelServer(answers) as server:
        monkeypatch.setitem(ENVIRONMENT, "NIGHT_LLM_KEY", secret)
        said = asked(workspace, server, "--api-key-env", "NIGHT_LLM_KEY", "--experiments", "1")
        assert server.headers[0]["authorization"] == f"Bearer {secret}"
    assert [row["status"] for row in rows(workspace)] == ["keep"]
    assert secret not in said
    stored = [path for path in workspace.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert stored == []
    assert "NIGHT_LLM_KEY" not in child_environment({"NIGHT_LLM_KEY": secret, "PATH": "/bin"})


@pytest.mark.slow
def test_a_budget_of_tokens_calls_or_dollars_ends_the_night_and_a_resume_may_add(workspace):
    with LanguageModelServer([Answer(fenced(kernel("discard 0.9", name=f"k{n}"))) for n in range(9)]) as server:
        said = asked(workspace, server, "--calls", "2")
        assert "budget reached: 2 of 2 model calls are made" in said
        assert "tokens are used" in asked(workspace, server, "--calls", "9", "--tokens", "3000", verb="resume")
        assert len(server.requests) == 3
        spent = 2.9 * ONE_CALL_USD
        said = asked(workspace, server, "--tokens", "99999", "--dollars", f"{spent:.6f}", verb="resume")
        assert "are spent" in said
        assert len(server.requests) == 3


def test_a_dollar_cap_on_a_model_without_a_price_is_said_to_be_unenforceable(workspace):
    with LanguageModelServer([Answer(fenced(FAST), usage=(400, 100))]) as server:
        flags = ("--proposer", "llm", "--llm", "my-model", "--api-base", server.url, "--dollars", "1")
        said = drive(workspace, "run", *flags, "--experiments", "1")
    assert "the price of my-model is unknown: --dollars cannot be enforced" in said
    assert rows(workspace)[0]["cost_usd"] == ""


def test_the_same_failing_file_ten_times_is_judged_once_and_its_target_parked(workspace):
    with LanguageModelServer([Answer(fenced(kernel("incorrect", name="same")))]) as server:
        asked(workspace, server, "--experiments", "10")
        assert len(server.requests) < 10
    statuses = [row["status"] for row in rows(workspace)]
    assert statuses[0] == "incorrect"
    assert set(statuses[1:]) == {"duplicate"}
    assert len((workspace / ".overnight/night/judged.txt").read_text().split()) == 1


@pytest.mark.slow
def test_a_small_real_night_judges_what_a_server_proposes(tmp_path):
    model = (
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.softmax(x * 2.0, -1)\n\n    def example_inputs(self, device, dtype):\n"
        "        return (torch.randn(64, 512, device=device, dtype=dtype),)\n"
    )
    workspace = make_workspace(tmp_path / "w")
    (workspace / "model.py").write_text(model)
    right = "import torch\n\n\ndef kernel_fn(x, **_):\n    return torch.softmax(x * 2.0, -1)\n"
    answers = [
        Answer("Let me explain softmax to you."),
        Answer(fenced("import torch\n\n\ndef kernel_fn(x, **_):\n    return torch.zeros_like(x)\n")),
        Answer(fenced(right)),
        Answer(fenced("# again\n" + right)),
    ]
    with LanguageModelServer(answers) as server:
        command = [
            sys.executable, "-P", str(ROOT / "agent/__main__.py"), "run", "model.py:Net", "--device", "cpu", "--llm",
            PRICED, "--api-base", server.url, "--experiments", "4", "--name", "night",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=workspace, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is more than is allowed" in server.prompt(2) or "incorrect" in server.prompt(2)
    statuses = [row["status"] for row in rows(workspace)]
    assert statuses[:2] == ["invalid_reply", "incorrect"]
    assert statuses[2] in {"discard", "keep"}
    assert statuses[3] == "duplicate"

"""A night with a language model that is scripted: statuses, costs, refusals, and nothing bought twice."""

import json
import os
import signal

import pytest
from llm_server import Answer, LanguageModelServer, refusal
from workspaces import drive, git, kernel, make_workspace, rows, start

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


@pytest.mark.parametrize("moment", ["proposed:5", "judged:4", pytest.param("decided:6", marks=pytest.mark.slow)])
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

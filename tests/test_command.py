"""Any program as a proposer: prompt in, kernel out, and every way in which a program can fail."""

import sys
import time

import psutil
import pytest
from tests_support import target, verdict
from workspaces import drive, make_workspace, rows

from agent.errors import InputError, ProviderError, StopRequestedError
from agent.proposers.command import CommandProposer
from agent.proposers.prompt import prompt_for
from agent.proposers.replies import kernel_file_in
from agent.records import Attempt, Brief, Candidate, Command, InvalidReply, RowStatus
from harness.records import Status

KERNEL = "def kernel_fn(x):\n    return x\n"


def brief(**changes):
    attempt = Attempt(1, "", "x", "cpp", "", "unrolled", RowStatus.INCORRECT, verdict(Status.INCORRECT))
    values = {
        "target": target("a", 0.5), "device": "cpu", "device_name": "EPYC", "peaks": {"copy_bytes_per_s": 2e10},
        "incumbent_source": None, "incumbent_backend": None, "attempts": (attempt,), "program": "Prefer simple code.",
    }  # fmt: skip
    return Brief(**{**values, **changes})


def proposer(code, timeout_s=20.0, stop=lambda: False):
    return CommandProposer(Command((sys.executable, "-c", code), timeout_s), stop)


def test_the_prompt_goes_in_and_the_kernel_comes_out():
    code = f"import sys; prompt = sys.stdin.read(); assert 'Prefer simple code.' in prompt; print({KERNEL!r})"
    proposal = proposer(code).propose(brief())
    assert isinstance(proposal, Candidate)
    assert (proposal.source.strip(), proposal.backend) == (KERNEL.strip(), "library")
    assert "unrolled (why)" in proposal.prompt
    assert proposal.usage.calls == 1
    assert proposal.usage.cost_usd is None


@pytest.mark.parametrize(
    ("reply", "kernel"),
    [
        (f"Here it is:\n```python\n{KERNEL}```\nDone.", KERNEL),
        (f"```\nx = 1\n```\nand\n```py\n{KERNEL}```\n", KERNEL),
        (f"```python\r\n{KERNEL}```\r\n", KERNEL),
        (KERNEL, KERNEL),
        ("I cannot do that.", None),
        ("```python\nx = 1\n```", None),
        ("", None),
    ],
)
def test_a_kernel_is_found_in_a_reply_or_there_is_none(reply, kernel):
    assert kernel_file_in(reply) == kernel


def test_a_reply_without_a_kernel_is_an_invalid_reply_with_the_reason():
    proposal = proposer("print('sorry, no')").propose(brief())
    assert isinstance(proposal, InvalidReply)
    assert "sorry, no" in proposal.reason


def test_a_program_that_takes_too_long_is_killed_with_its_children():
    nap = "import time; time.sleep(61.5)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{nap}']); {nap}"
    began = time.monotonic()
    proposal = proposer(code, timeout_s=1.0).propose(brief())
    assert time.monotonic() - began < 10
    assert "no reply within 1 s" in proposal.reason
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "time.sleep(61.5)" in " ".join(one.info["cmdline"] or [])
    ]


def test_a_program_that_fails_or_floods_stops_the_session_with_its_words():
    with pytest.raises(ProviderError, match="exit code 3: out of credit"):
        proposer("import sys; sys.stderr.write('out of credit'); sys.exit(3)").propose(brief())
    with pytest.raises(ProviderError, match="more than 4 MiB"):
        proposer("while True: print('x' * 65536)").propose(brief())


def test_a_stop_ends_a_waiting_program():
    with pytest.raises(StopRequestedError):
        proposer("import time; time.sleep(60)", stop=lambda: True).propose(brief())


def test_a_missing_program_is_said_before_anything_starts():
    with pytest.raises(InputError, match="there is no program no-such-agent"):
        CommandProposer(Command(("no-such-agent",)))
    with pytest.raises(InputError, match="needs --command"):
        CommandProposer(Command())


def test_the_prompt_shows_the_kept_kernel_and_never_more_than_the_last_attempts():
    many = tuple(Attempt(n, "", "", "cpp", "", f"idea {n}", RowStatus.DISCARD, None) for n in range(1, 40))
    text = prompt_for(brief(incumbent_source="kept()", incumbent_backend="cpp", attempts=many))
    assert "kept()" in text
    assert "idea 39" in text
    assert "idea 27" not in text


def test_a_failing_program_stops_the_night_resumably(tmp_path):
    workspace = make_workspace(tmp_path)
    said = drive(workspace, "run", "--proposer", "command", "--command", "false", check=False)
    assert said.endswith("exit 3")
    assert "overnight resume night" in said
    script = workspace / "propose.sh"
    script.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n# verdict: keep 1.5\n{KERNEL}END\n")
    script.chmod(0o755)
    drive(workspace, "resume", "--command", str(script), "--experiments", "1")
    assert [(row["status"], row["proposer"], row["cost_usd"]) for row in rows(workspace)] == [("keep", "command", "")]

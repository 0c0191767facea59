"""Replay: recordings in the order of their names, each once, on from where a session was."""

import pytest
from tests_support import target
from workspaces import drive, kernel, make_workspace, rows

from agent.errors import InputError
from agent.proposers.base import Ordered
from agent.proposers.replay import Replay, read_recording
from agent.proposers.replies import backend_of
from agent.records import Attempt, Brief, Candidate, InvalidReply, NothingLeft, RowStatus


def brief(name, *tactics):
    attempts = tuple(Attempt(n, "", "", "cpp", tactic, "", RowStatus.DISCARD, None) for n, tactic in enumerate(tactics))
    return Brief(target(name, 0.5), "cpu", "cpu", {}, None, None, attempts, "")


@pytest.fixture
def folder(tmp_path):
    for name, source in {
        "0002_b__second.py": "import triton\n",
        "0001_a__first_one.py": "# backend: cpp\nx = 1\n",
        "0003_*__for_all.py": "x = 3\n",
        "0004_a__no_kernel.py": "INVALID REPLY: nothing in it\n",
    }.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def test_recordings_come_in_the_order_of_their_names_each_once_per_target(folder):
    replay = Replay(folder)
    assert isinstance(replay, Ordered)
    first = replay.propose(brief("a"))
    assert isinstance(first, Candidate)
    assert (first.tactic, first.backend, first.description) == ("0001_a__first_one.py", "cpp", "first one")
    assert replay.propose(brief("b")).tactic == "0002_b__second.py"
    assert replay.propose(brief("a", "0001_a__first_one.py")).tactic == "0003_*__for_all.py"
    last = replay.propose(brief("a", "0001_a__first_one.py", "0003_*__for_all.py"))
    assert isinstance(last, InvalidReply)
    assert last.reason == "0004_a__no_kernel.py: nothing in it"
    assert isinstance(replay.propose(brief("c", "0003_*__for_all.py")), NothingLeft)


def test_a_session_plays_across_targets_in_the_order_of_the_names_and_goes_on_after_a_break(tmp_path):
    recordings = {
        "0001_softmax_b__one.py": kernel("incorrect", name="1"),
        "0002_rmsnorm_a__two.py": kernel("incorrect", name="2"),
        "0003_any__three.py": kernel("incorrect", name="3"),
        "0004_softmax_b__four.py": "INVALID REPLY: empty",
        "0005_rmsnorm_a__five.py": kernel("incorrect", name="5"),
    }
    workspace = make_workspace(tmp_path, recordings=recordings)
    for amount in ("2", "+2", "+3"):
        drive(workspace, "run" if amount == "2" else "resume", "--experiments", amount)
    played = [(row["target"], row["description"].partition(":")[0]) for row in rows(workspace)]
    assert played == [
        ("softmax_b", "one"),
        ("rmsnorm_a", "two"),
        ("rmsnorm_a", "three"),
        ("softmax_b", "three"),
        ("softmax_b", "0004_softmax_b__four.py"),
        ("rmsnorm_a", "five"),
    ]


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        ("import triton.language as tl", "triton"),
        ("subprocess.run(['nvcc'])", "cuda"),
        ("SOURCE = '__global__ void f()'", "cuda"),
        ("import ctypes\nsubprocess.run(['g++', path])", "cpp"),
        ("import torch\n", "library"),
    ],
)
def test_the_backend_is_read_off_what_a_file_calls(source, backend):
    assert backend_of(source) == backend


def test_the_header_wins_over_the_name(tmp_path):
    file = tmp_path / "0001_a__x.py"
    file.write_bytes(b"# target: other_1\r\n# backend: cuda\r\nx = 1\r\n")
    recording = read_recording(file)
    assert (recording.target, recording.backend) == ("other_1", "cuda")
    assert recording.source.endswith("x = 1\r\n")


def test_names_folders_and_backends_that_make_no_sense_are_said(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        Replay(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no NNNN"):
        Replay(tmp_path)
    (tmp_path / "kernel.py").write_text("x")
    with pytest.raises(InputError, match="must be called"):
        Replay(tmp_path)
    (tmp_path / "kernel.py").rename(tmp_path / "0001_a__x.py")
    (tmp_path / "0001_a__x.py").write_text("# backend: basic\n")
    with pytest.raises(InputError, match="unknown backend basic"):
        Replay(tmp_path)

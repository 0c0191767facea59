"""results.tsv: 25 columns in every line whatever happens to the file, and never two lines for one experiment."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from agent import results
from agent.errors import InputError
from agent.records import Candidate, Experiment, ExperimentState, InvalidReply, RowStatus, Usage
from harness.records import StageName, StageResult, StageStatus, Status, Timing, Verdict


def verdict(status=Status.KEEP, stage=None):
    accepted = status in {Status.KEEP, Status.DISCARD}
    timing = Timing(12.0, 10.0, 8.0, 1.5, 1.25, 1.2, 1.3, 0.01, throughput_tflops=0.5) if accepted else None
    stages = {name: StageResult(StageStatus.PASS, 0.1) for name in StageName}
    return Verdict(accepted, status, "t", "cpu", stage, None, "why", None, stages, timing, (), "0" * 64)


def experiment(number=1, status=RowStatus.KEEP, description="faster", **changes):
    candidate = Candidate("t", "cpp", "x = 1", description, "replay", usage=Usage(10, 0.25, 1))
    values = {
        "number": number, "target": "t", "state": ExperimentState.DECIDED, "candidate": candidate, "status": status,
        "verdict": verdict(), "commit": "abc", "started_at": "2026-11-30T20:00:00Z",
        "finished_at": "2026-11-30T20:00:01Z",
    }  # fmt: skip
    return Experiment(**{**values, **changes})


def row(one=None, session="s"):
    return results.row_of(one or experiment(), session=session, kernel_type="rmsnorm", device="cpu")


def test_the_columns_are_those_of_the_contract_and_of_the_repository():
    first_ten = "experiment tag kernel_type throughput_tflops latency_us pct_peak speedup_vs_pytorch correctness"
    assert " ".join(results.COLUMNS[:8]) == first_ten
    assert len(results.COLUMNS) == 25
    from agent.harness_client import PACKAGE_ROOT

    header = (PACKAGE_ROOT / "results.tsv").read_text().splitlines()[0]
    assert header == results.HEADER


def test_a_row_has_its_figures_where_autokernel_readers_look(tmp_path):
    path = tmp_path / "results.tsv"
    results.append(path, row())
    (line,) = results.read(path)
    assert (line["tag"], line["correctness"], line["latency_us"], line["speedup_vs_pytorch"]) == (
        "keep",
        "PASS",
        8,
        1.5,
    )
    assert (line["experiment"], line["tokens"], line["cost_usd"], line["pct_peak"]) == (1, 10, 0.25, None)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a\tb", "a\\tb"),
        ("a\r\nb", "a\\r\\nb"),
        ("=cmd()", "'=cmd()"),
        ("@x", "'@x"),
        ("-1.5", "-1.5"),
        ("back\\slash", "back\\\\slash"),
        ("bell\a\x1b[31m\u2028", "bell  [31m "),
        ("\ud800", "?"),
    ],
)
def test_no_text_can_break_a_line_or_run_as_a_formula(tmp_path, text, cell):
    assert results.escape(text) == cell
    path = tmp_path / "results.tsv"
    results.append(path, row(experiment(description=text)))
    results.append(path, row(experiment(2)))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.count("\t") for line in lines] == [24, 24, 24]


def test_the_same_experiment_is_written_once(tmp_path):
    path = tmp_path / "results.tsv"
    for _ in range(2):
        results.append(path, row())
    results.append(path, row(session="other"))
    assert len(path.read_text().splitlines()) == 3


def test_two_sessions_that_write_at_once_lose_no_line(tmp_path):
    path = tmp_path / "results.tsv"

    def write(session):
        for number in range(1, 26):
            results.append(path, row(experiment(number), session=session))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    assert len(results.read(path)) == 100


def test_a_line_torn_by_a_power_cut_is_dropped_and_written_again(tmp_path):
    path = tmp_path / "results.tsv"
    results.append(path, row())
    whole = path.read_text()
    path.write_text(whole + "2\tkeep\trms")
    results.append(path, row(experiment(2)))
    assert [line["experiment"] for line in results.read(path)] == [1, 2]
    assert path.read_text().startswith(whole)


def test_windows_line_endings_do_not_hide_the_header(tmp_path):
    path = tmp_path / "results.tsv"
    path.write_bytes((results.HEADER + "\r\n").encode())
    results.append(path, row())
    assert len(results.read(path)) == 1


@pytest.mark.parametrize("content", ["", "\n", results.HEADER])
def test_an_empty_file_or_a_header_without_its_end_is_completed(tmp_path, content):
    path = tmp_path / "results.tsv"
    path.write_text(content)
    results.append(path, row())
    assert [line.count("\t") for line in path.read_text().splitlines()] == [24, 24]


def test_a_file_with_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "results.tsv"
    path.write_text("run\tvalue\n1\t2\n")
    with pytest.raises(InputError, match="other columns"):
        results.append(path, row())
    assert path.read_text() == "run\tvalue\n1\t2\n"


def test_rebuilding_changes_nothing_and_keeps_sessions_that_are_gone(tmp_path):
    path = tmp_path / "results.tsv"
    gone, mine = row(session="gone"), [row(experiment(1)), row(experiment(2, RowStatus.DISCARD))]
    for one in [gone, *mine]:
        results.append(path, one)
    before = path.read_text()
    results.rebuild(path, mine, ["s"])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("status", "correctness"),
    [
        (RowStatus.DISCARD, "PASS"),
        (RowStatus.INCORRECT, "FAIL"),
        (RowStatus.CHEAT, "FAIL"),
        (RowStatus.CRASH, "CRASH"),
        (RowStatus.TIMEOUT, "TIMEOUT"),
        (RowStatus.INTERRUPTED, "FAIL"),
    ],
)
def test_every_status_has_a_correctness_that_autokernel_knows(status, correctness):
    assert row(experiment(status=status, verdict=None)).correctness == correctness
    assert row(experiment(status=status, verdict=None)).tag == "discard"


def test_an_invalid_reply_shows_who_sent_it_and_what_it_cost():
    invalid = InvalidReply("t", "llm", "no file", usage=Usage(7, None, 1))
    one = experiment(candidate=None, verdict=None, status=RowStatus.INVALID_REPLY, detail="no file")
    line = results.row_of(one, session="s", kernel_type="t", device="cpu", invalid=invalid)
    assert (line.proposer, line.tokens, line.cost_usd, line.description) == ("llm", "7", "", "no file")

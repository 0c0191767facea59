"""The journal: steps only forward, durable, refused when newer, time counted over all runs."""

import sqlite3
import time

import pytest
from tests_support import verdict

from agent.errors import InputError, MachineError
from agent.journal import Decision, Journal
from agent.records import Candidate, ExperimentState, InvalidReply, RowStatus, Usage


def candidate(**changes):
    return Candidate(
        **{"target": "t", "backend": "cpp", "source": "x\n", "description": "d", "proposer": "p", **changes}
    )


@pytest.fixture
def journal(tmp_path):
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def test_an_experiment_goes_through_its_four_states_and_comes_back_as_it_was(journal):
    number = journal.propose("t", candidate(source="é\t\r\n"))
    journal.judged(number, verdict(), judge_s=2.0)
    journal.decided(number, Decision(RowStatus.KEEP, "", "abc", 1.5, 1.1))
    journal.recorded(number)
    (one,) = journal.experiments()
    assert (one.number, one.state, one.status, one.commit) == (1, ExperimentState.RECORDED, RowStatus.KEEP, "abc")
    assert one.candidate.source == "é\t\r\n"
    assert one.verdict == verdict()
    assert (one.model_ms, one.model_speedup) == (1.5, 1.1)
    assert journal.judge_seconds() == {"t": 2.0}


def test_no_step_is_taken_twice_or_backwards(journal):
    number = journal.propose("t", candidate())
    journal.judged(number, verdict(), judge_s=1.0)
    with pytest.raises(AssertionError):
        journal.judged(number, verdict(), judge_s=1.0)
    journal.decided(number, Decision(RowStatus.DISCARD))
    with pytest.raises(AssertionError):
        journal.decided(number, Decision(RowStatus.KEEP))
    assert journal.experiment(number).status is RowStatus.DISCARD


def test_an_invalid_reply_is_numbered_and_its_text_kept(journal):
    number = journal.propose("t", InvalidReply("t", "llm", "no file", reply="hello"))
    assert journal.experiment(number).candidate is None
    assert journal.invalid_reply(number).reply == "hello"


def test_costs_add_up_and_one_unknown_price_makes_the_sum_unknown(journal):
    journal.propose("t", candidate(usage=Usage(10, 0.5, 1)))
    journal.propose("t", candidate(usage=Usage(10, 0.5, 1)), again=True)
    assert journal.usage() == Usage(10, 0.5, 1)
    journal.propose("t", InvalidReply("t", "llm", "no", usage=Usage(5, None, 1)))
    assert journal.usage() == Usage(15, None, 2)


def test_a_journal_of_a_newer_overnight_is_refused(tmp_path):
    Journal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(InputError, match="newer Overnight"):
        Journal(tmp_path / "j")


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path):
    (tmp_path / "j").write_text("x" * 4096)
    with pytest.raises(MachineError, match="cannot be opened"):
        Journal(tmp_path / "j")


def test_active_time_counts_over_all_runs_and_not_between_them(tmp_path):
    for _ in range(2):
        journal = Journal(tmp_path / "j")
        journal.start_run()
        time.sleep(0.1)
        journal.set_note("x", "y")
        journal.close()
        time.sleep(0.15)
    journal = Journal(tmp_path / "j")
    assert 0.2 <= journal.active_s() < 0.3
    journal.close()


def test_every_transaction_is_synced_to_disk(journal):
    assert journal._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_reader_sees_what_a_writer_has_committed(journal, tmp_path):
    journal.propose("t", candidate())
    reader = Journal(tmp_path / "journal.sqlite")
    assert len(reader.experiments()) == 1
    journal.propose("t", candidate())
    assert len(reader.experiments()) == 2
    reader.close()


# Readers that change nothing


def test_a_reader_sees_what_a_writer_adds_and_changes_no_file_of_its(journal):
    journal.propose("t", candidate())
    reader = Journal(journal.path, read_only=True)
    assert [one.number for one in reader.experiments()] == [1]
    journal.propose("t", candidate())
    assert [one.number for one in reader.experiments()] == [1, 2]
    with pytest.raises(MachineError, match="readonly"):
        reader.set_note("a", "b")
    reader.close()
    journal.set_note("still", "writable")


def test_a_reader_need_not_read_what_it_knows_again(journal):
    for _ in range(2):
        journal.decided(journal.propose("t", candidate()), Decision(RowStatus.CRASH))
    journal.recorded(1)
    first, second = journal.experiments()
    reader = Journal(journal.path, read_only=True, known=[first])
    again, fresh = reader.experiments()
    reader.close()
    assert again is first
    assert fresh == second


def test_a_reader_makes_no_journal_where_there_is_none_and_refuses_other_schemas(tmp_path):
    with pytest.raises(MachineError, match="cannot be opened"):
        Journal(tmp_path / "journal.sqlite", read_only=True)
    assert not list(tmp_path.iterdir())
    for version, words in ((99, "newer Overnight"), (0, "older Overnight")):
        path = tmp_path / f"{version}.sqlite"
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version={version}")
        connection.close()
        with pytest.raises(InputError, match=words):
            Journal(path, read_only=True)

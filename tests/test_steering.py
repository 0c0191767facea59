"""Steering a session from outside: pause, stop, skip, pin, try, and edits of its settings while it runs."""

import json
import time

import psutil
import pytest
from test_cli import check_refused, overnight
from test_session import finish, judging, wait_for
from workspaces import drive, kernel, make_workspace, record, rows, start

from agent.cli import main
from agent.places import SessionPlaces
from agent.steering import Steering, hand_in, steer, steering, waiting

MANY = {
    f"{number:04d}_rmsnorm_a__n{number}.py": kernel("discard 1", "# slow: 0.5", name=str(number))
    for number in range(1, 9)
}
BOTH = {
    "0001_rmsnorm_a__one.py": kernel("incorrect", "# slow: 0.5", name="1"),
    "0002_softmax_b__two.py": kernel("incorrect", "# slow: 0.5", name="2"),
    "0003_rmsnorm_a__three.py": kernel("incorrect", "# slow: 0.5", name="3"),
    "0004_softmax_b__four.py": kernel("incorrect", "# slow: 0.5", name="4"),
}


def count(workspace):
    path = workspace / "results.tsv"
    return len(rows(workspace)) if path.exists() and path.read_bytes().endswith(b"\n") else 0


@pytest.fixture
def at_once(monkeypatch, capfd):
    """A command in this process: it takes effect while the first experiment still runs, however busy the machine is."""

    def call(folder, *arguments):
        monkeypatch.chdir(folder)
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return end.value.code, capfd.readouterr().out

    return call


def judges_of(process):
    children = psutil.Process(process.pid).children()
    return [one for one in children if "scripted_harness" in " ".join(one.cmdline())]


def running(workspace):
    return json.loads(overnight(workspace, "status", "--json").stdout)


def test_a_pause_lets_the_experiment_end_frees_the_judge_and_resume_goes_on(tmp_path, at_once):
    workspace = make_workspace(tmp_path, recordings=MANY)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    assert at_once(workspace, "pause")[0] == 0
    wait_for(lambda: not judges_of(process))
    done = count(workspace)
    assert done >= 1
    active = running(workspace)["spent"]["active_s"]
    time.sleep(1.5)
    state = running(workspace)
    assert (state["running"], state["paused"], count(workspace)) == (True, True, done)
    assert state["spent"]["active_s"] == pytest.approx(active, abs=0.5)
    assert at_once(workspace, "resume") == (0, "session night goes on after its pause\n")
    said = finish(process, 60)
    assert count(workspace) == len(MANY)
    assert said.index("paused: go on") < said.index("going on after the pause")


@pytest.mark.parametrize(("arguments", "last"), [([], "discard"), (["--now"], "interrupted")])
def test_a_stop_finishes_the_experiment_and_now_cuts_it_off(tmp_path, at_once, arguments, last):
    slow = {name: source.replace("slow: 0.3", "slow: 4") for name, source in list(MANY.items())[:2]}
    workspace = make_workspace(tmp_path, recordings=slow)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    assert at_once(workspace, "stop", *arguments)[0] == 0
    assert process.wait(timeout=5) == 0
    process.stdout.close()
    assert [row["status"] for row in rows(workspace)] == [last]


def test_a_paused_session_stops_when_asked(tmp_path, at_once):
    workspace = make_workspace(tmp_path, recordings=MANY)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    at_once(workspace, "pause")
    wait_for(lambda: count(workspace) >= 1)
    assert overnight(workspace, "stop").returncode == 0
    assert process.wait(timeout=5) == 0
    process.stdout.close()


@pytest.mark.slow
def test_a_skipped_target_is_left_alone_until_that_is_taken_back(tmp_path):
    workspace = make_workspace(tmp_path, recordings=BOTH)
    drive(workspace, "run", "--experiments", "1")
    assert overnight(workspace, "skip", "softmax_b").returncode == 0
    drive(workspace, "resume", "--experiments", "9")
    assert {row["target"] for row in rows(workspace)} == {"rmsnorm_a"}
    assert overnight(workspace, "skip", "softmax_b", "--off").returncode == 0
    drive(workspace, "resume")
    assert [row["target"] for row in rows(workspace)].count("softmax_b") == 2


def test_a_pinned_target_is_the_only_one_worked_on_while_it_runs(tmp_path, at_once):
    workspace = make_workspace(tmp_path, recordings=BOTH)
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    assert at_once(workspace, "pin", "softmax_b")[0] == 0
    said = finish(process, 30)
    assert "softmax_b was pinned and has nothing left" in said
    assert [row["target"] for row in rows(workspace)] == ["rmsnorm_a", "softmax_b", "softmax_b", "rmsnorm_a"]
    assert running(workspace)["pinned"] is None


def test_pin_and_skip_overrule_each_other():
    wish = Steering(skipped=("a",), pinned="b")
    assert wish.closed(("a", "b", "c")) == {"a", "c"}
    assert wish.closed(("a", "c")) == {"a"}  # the pinned one is done: the others are worked on again


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    workspace = make_workspace(tmp_path_factory.mktemp("stopped") / "w", recordings=BOTH)
    drive(workspace, "run", "--experiments", "1")
    return workspace


@pytest.mark.parametrize("verb", ["skip", "pin"])
def test_a_target_that_the_session_does_not_have_is_refused(stopped, monkeypatch, capfd, verb):
    monkeypatch.chdir(stopped)
    check_refused(stopped, [verb, "nothing"], "it has rmsnorm_a, softmax_b", capfd)


def test_a_session_that_does_not_run_has_nothing_to_pause(stopped):
    done = overnight(stopped, "pause")
    assert (done.returncode, done.stdout) == (1, "session night is not running: there is nothing to pause\n")


# try


def test_a_kernel_of_a_persons_is_the_next_experiment_of_a_running_session(tmp_path, at_once):
    workspace = make_workspace(tmp_path, recordings=MANY)
    (workspace / "mine.py").write_text(kernel("keep 1.5", name="mine"))
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    code, said = at_once(workspace, "try", "mine.py", "--target", "softmax_b", "--wait")
    assert (code, "keep" in said) == (0, True)
    process.terminate()
    finish(process)
    (mine,) = [row for row in rows(workspace) if row["proposer"] == "try"]
    assert (mine["target"], mine["status"], mine["description"]) == ("softmax_b", "keep", "mine.py by hand")
    assert mine["experiment"] == "2"


def test_a_kernel_handed_to_a_stopped_session_is_judged_first_and_once(tmp_path):
    workspace = make_workspace(tmp_path, recordings=BOTH)
    drive(workspace, "run", "--experiments", "1")
    (workspace / "mine.py").write_text(kernel("discard 1", name="mine"))
    done = overnight(workspace, "try", "mine.py", "--target", "rmsnorm_a", "--description", "my idea")
    assert (done.returncode, "judged first when you" in done.stdout) == (0, True)
    assert "--experiments +1" in done.stdout
    drive(workspace, "resume", "--experiments", "9")
    drive(workspace, "resume")
    assert [row["description"] for row in rows(workspace)].index("my idea") == 1
    assert len(rows(workspace)) == len(BOTH) + 1


def test_a_kill_between_taking_a_kernel_and_forgetting_it_judges_it_once(tmp_path):
    workspace = make_workspace(tmp_path, recordings=BOTH)
    drive(workspace, "run", "--experiments", "1")
    places = SessionPlaces(workspace, "night")
    name = hand_in(places, "rmsnorm_a", "library", kernel("discard 1", name="mine"), "mine")
    left = waiting(places)[0]
    drive(workspace, "resume", "--experiments", "2")
    assert waiting(places) == []
    (places.folder / "tries" / f"{name.partition(':')[2]}.json").write_text(json.dumps({**vars(left), "usage": {}}))
    assert len(waiting(places)) == 1
    drive(workspace, "resume", "--experiments", "9")
    assert [row["description"] for row in rows(workspace)].count("mine") == 1


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "there is no file"),
        ("def f(: pass", [], "does not parse"),
        ("x = 1\n", [], "defines no kernel_fn"),
        ("kernel_fn = len\n", ["--backend", "cobol"], "--backend cobol is not known"),
        ("kernel_fn = len\n", ["--target", "nothing"], "nothing is not a target"),
    ],
)
def test_what_can_be_no_kernel_is_refused_before_it_costs_an_experiment(
    stopped, monkeypatch, capfd, content, arguments, words
):
    monkeypatch.chdir(stopped)
    (stopped / "mine.py").unlink(missing_ok=True)
    if content is not None:
        (stopped / "mine.py").write_text(content)
    check_refused(stopped, ["try", "mine.py", "--target", "rmsnorm_a", *arguments], words, capfd)


def test_two_commands_at_once_do_not_lose_each_others_wish(tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    places = SessionPlaces(tmp_path, "night")
    places.folder.mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda number: steer(places, lambda wish: replace(wish, skipped=(*wish.skipped, str(number)))),
                range(40),
            )
        )
        names = list(pool.map(lambda number: hand_in(places, "t", "cpp", str(number), ""), range(20)))
    assert len(steering(places).skipped) == 40
    assert len(set(names)) == len(waiting(places)) == 20


# Settings


def test_an_edited_budget_takes_effect_while_the_session_runs_and_a_mistake_is_said(tmp_path):
    workspace = make_workspace(tmp_path, recordings=MANY)
    (workspace / "overnight.yaml").write_text("budget: {experiments: 8}\n")
    process = start(workspace, "run")
    wait_for(lambda: judging(workspace))
    (workspace / "overnight.yaml").write_text("budget: {experimints: 3}\n")
    wait_for(lambda: count(workspace) >= 2)
    (workspace / "overnight.yaml").write_text("budget: {experiments: 4}\nlibrary_calls: forbid\n")
    said = finish(process, 60)
    assert "experimints" in said
    assert "the settings read before stay in force" in said
    assert "budget.experiments takes effect now" in said
    assert "library_calls takes effect in a new session only" in said
    assert count(workspace) == 4


def test_a_flag_wins_over_an_edited_setting(tmp_path):
    workspace = make_workspace(tmp_path, recordings=MANY)
    (workspace / "overnight.yaml").write_text("budget: {experiments: 5}\n")
    drive(workspace, "run", "--experiments", "2")
    (workspace / "overnight.yaml").write_text("budget: {experiments: 7}\n")
    said = drive(workspace, "resume", "--experiments", "3")
    assert "does not count: a flag of run or resume set it" in said
    assert count(workspace) == 3


def test_guidance_that_cannot_be_read_is_said_and_the_old_one_kept(tmp_path):
    workspace = make_workspace(tmp_path, recordings=MANY)
    record(workspace, "0001_rmsnorm_a__n1.py", kernel("discard 1", name="1"))
    (workspace / "program.md").mkdir()
    said = drive(workspace, "run", "--experiments", "1")
    assert "program.md cannot be read (Is a directory)" in said

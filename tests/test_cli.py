"""The command line: quick help, one sentence per mistake, the exit codes of the contracts, JSON alone on stdout."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workspaces import ENVIRONMENT, drive, git, kernel, make_workspace

from agent.cli import main
from agent.results import COLUMNS

ROOT = Path(__file__).resolve().parent.parent


def overnight(folder, *arguments, timeout=100, environment=None):
    """`python -m agent` in a folder that is not ours."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "agent", *arguments],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def refused(monkeypatch, capfd):
    """Call the command line in this process, which spares a start-up for each of many mistakes."""

    def call(folder, *arguments, words):
        monkeypatch.chdir(folder)
        check_refused(folder, arguments, words, capfd)

    return call


def check_refused(folder, arguments, words, capfd):
    """A mistake of the user: exit 2, one sentence on standard error, nothing else, nothing left behind."""
    before = sorted(str(path) for path in folder.rglob("*") if ".git" not in path.parts)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capfd.readouterr()
    assert exit_.value.code == 2, printed
    assert words in " ".join(printed.err.split()), printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert sorted(str(path) for path in folder.rglob("*") if ".git" not in path.parts) == before


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "w")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A workspace with a finished session of three experiments."""
    recordings = {
        "0001_rmsnorm_a__one.py": kernel(),
        "0002_softmax_b__two.py": kernel("incorrect"),
        "0003_softmax_b__three.py": "INVALID REPLY: empty",
    }
    folder = make_workspace(tmp_path_factory.mktemp("finished"), recordings=recordings)
    drive(folder, "run")
    return folder


def test_help_is_quick_and_loads_neither_torch_nor_litellm(tmp_path):
    code = (
        "import sys; from agent import cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'litellm', 'numpy', 'git', 'pydantic', 'psutil', 'yaml'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert "HEAVY []" in done.stdout, done.stdout + done.stderr
    durations = []
    for _ in range(2):
        began = time.monotonic()
        assert overnight(tmp_path, "--help").returncode == 0
        durations.append(time.monotonic() - began)
    assert min(durations) < 2.0  # 0.2 s on an idle core; this only catches a heavy import


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "nowhere.py:Net"], "there is no file nowhere.py"),
        (["profile", "nowhere"], "MODEL nowhere was not found"),
        (["profile", ""], "MODEL was not found"),
        (["profile", ".git"], "MODEL .git is a folder without config.json"),
        (["profile", ".git/HEAD"], "MODEL .git/HEAD is neither Python nor a checkpoint folder"),
        (["profile"], "Missing argument 'MODEL': see `overnight profile --help`"),
        (["profile", "model.py:Net", "--bogus"], "No such option: --bogus: see `overnight profile --help`"),
        (["frobnicate"], "No such command 'frobnicate': see `overnight --help`"),
        (["profile", "model.py:Net", "--dtype", ""], "--dtype is not known"),
        (["profile", "model.py:Net", "--weights", ""], "--weights: there is no file"),
        (["profile", "model.py:Net", "--inputs", ""], "must read FILE.py:FUNCTION"),
        (["profile", "model.py:Net", "--input-shape", "0,16"], "every size must be at least 1"),
        (["profile", "model.py:Net", "--device", "tpu"], "--device tpu is not known"),
        (["profile", "model.py:Net", "--dtype", "int4"], "--dtype int4 is not known"),
        (["profile", "model.py:Net", "--input-shape", "1x2"], "--input-shape 1x2 must be sizes"),
        (["profile", "model.py:Net", "--model-args", "width"], "--model-args width must read NAME=VALUE"),
        (["profile", "model.py:Net", "--inputs", "model.py"], "must read FILE.py:FUNCTION"),
        (["profile", "model.py:Net", "--weights", "w.pt"], "--weights: there is no file w.pt"),
        (["check", "--target", "softmax", "--kernel", "k.py"], "--kernel: there is no file k.py"),
        (["check", "--target", "sofmax", "--kernel", "model.py"], "sofmax is not a named op (softmax, reduce"),
        (["check", "--target", "softmax", "--kernel", "model.py", "--shape", "M:2"], "--shape M:2 must read like"),
        (["check", "--target", "softmax", "--kernel", "model.py", "--library-calls", "no"], "use allow or forbid"),
        (["check", "--target", "softmax", "--kernel", "model.py", "--shape", ""], "must read like M=512"),
        (["check", "--target", "softmax", "--kernel", ".git/index"], "is not UTF-8 text"),
        (["check", "--target", "softmax", "--kernel", "model.py/k.py"], "there is no file model.py/k.py"),
        (["run", "model.py:Net", "--proposer", "llm"], "--proposer llm needs a model: --llm MODEL"),
        (["run", "model.py:Net", "--proposer", "oracle"], "--proposer oracle is not known"),
        (["run", "model.py:Net", "--proposer", "replay:nowhere"], "there is no such folder"),
        (["run", "model.py:Net", "--hours", "soon"], "--hours soon must be a number"),
        (["run", "model.py:Net", "--name", "a/b"], "--name a/b must be made of"),
        (["run", "model.py:Net", "--config", "no.yaml"], "there is no file no.yaml"),
        (["run", "model.py:Net", "--config", ".git"], ".git cannot be read as a file of settings"),
        (["run", "model.py:Net", "--proposer", ""], "--proposer is not known"),
        (["run", "model.py:Net", "--proposer", "command", "--command", "'ls"], "close its quotes"),
        (["resume"], "There is no session"),
        (["status", "nobody"], "There is no session"),
        (["results", "nobody"], "There is no session"),
        (["verify", "--mode", "fastest"], "--mode fastest is not known"),
        (["logs", "-n", "-5"], "greater than or equal to 1"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_thing(workspace, refused, arguments, words):
    refused(workspace, *arguments, words=words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("propser: playbook\n", "unknown setting propser: did you mean proposer?"),
        ("budget: {hour: 8}\n", "unknown setting budget.hour: did you mean hours?"),
        ("llm: {models: [{modle: x, model: y}]}\n", "unknown setting llm.models.0.modle: did you mean model?"),
        ("budget: {hours: -1}\n", "budget.hours: Input should be greater than 0"),
        ("library_calls: maybe\n", "library_calls"),
        ("budget: 5\n", "budget must hold settings by name: calls, dollars, experiments, hours, tokens"),
        ("budget: {hours: .inf}\n", "budget.hours: Input should be a finite number"),
        ("[1, 2]\n", "must hold settings by name"),
        ("a: [\n", "not readable YAML"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_nearest_known_one(workspace, refused, settings, words):
    (workspace / "overnight.yaml").write_text(settings)
    refused(workspace, "run", "model.py:Net", "--proposer", "playbook", words=words)


def test_a_rebuild_never_overwrites_a_results_tsv_of_somebody_else(finished, refused):
    path = finished / "results.tsv"
    ours = path.read_bytes()
    path.write_text("run\tloss\n1\t0.5\n")
    refused(finished, "results", "--rebuild", words="has other columns than Overnight's")
    assert path.read_text() == "run\tloss\n1\t0.5\n"
    path.write_bytes(ours)


def test_a_kernel_file_of_many_megabytes_is_refused_before_a_judge_starts(workspace, refused):
    (workspace / "big.py").write_text("# padding\n" * 200_000)
    refused(workspace, "check", "--target", "softmax", "--kernel", "big.py", words="big.py is larger than 1 MiB")


def test_a_replay_folder_with_odd_files_names_the_file(workspace, refused):
    (workspace / "odd").mkdir()
    for file, words in [("0001_softmax_b__x.py", "is not UTF-8 text"), ("notes.py", "must be called NNNN_TARGET")]:
        (workspace / "odd" / file).write_bytes(b"x = '\xe9'\n")
        refused(workspace, "run", "model.py:Net", "--proposer", "replay:odd", words=f"odd/{file} {words}")
        (workspace / "odd" / file).unlink()
    (workspace / "odd" / "0001_softmax_b__x.py").mkdir()
    refused(workspace, "run", "model.py:Net", "--proposer", "replay:odd", words="cannot be read as a file")


def test_init_outside_a_checkout_makes_nothing(tmp_path, refused):
    refused(tmp_path, "init", words="is not in a git repository: run `git init`")
    git(tmp_path, "init", "-q", "--bare")
    refused(tmp_path, "init", words="start in a checkout")


def test_a_file_where_sessions_are_kept_is_refused_before_any_work(workspace, refused):
    (workspace / ".overnight").write_text("x")
    refused(workspace, "run", "model.py:Net", words=".overnight is a file where sessions are kept")
    assert ".overnight" not in (workspace / ".git/info/exclude").read_text()


def test_a_folder_that_is_gone_is_said_in_one_sentence(tmp_path):
    call = 'cd "$1" && rmdir "$1" && exec "$2" -P -m agent status'
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", call, "sh", str(gone), sys.executable],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "overnight: the current folder no longer exists: change to one that does.\n"


def test_a_results_tsv_that_is_a_folder_is_refused_before_any_work(workspace, refused):
    (workspace / "results.tsv").mkdir()
    for command in (["run", "model.py:Net"], ["results"]):
        refused(workspace, *command, words="results.tsv is a folder: move it away")


@pytest.mark.parametrize("setting", ["devices: [GPU-1]", "executor: ray\ndevices: [GPU-1]", "devices: [cpu:0, cpu:0]"])
def test_devices_that_cannot_be_had_are_refused_by_name(workspace, refused, setting):
    if "ray" in setting:
        pytest.importorskip("ray")
    (workspace / "overnight.yaml").write_text(setting + "\n")
    refused(workspace, "run", "model.py:Net", "--device", "cpu", words=setting.split("[")[1].split(",")[0].rstrip("]"))


def test_a_missing_compiler_is_the_machines_fault_and_said_before_any_work(workspace):
    done = overnight(workspace, "run", "model.py:Net", environment={"CXX": "no-such-compiler"})
    assert done.returncode == 3
    assert "no C++ compiler (no-such-compiler)" in done.stderr
    assert not (workspace / ".overnight").exists()


def test_a_night_needs_a_repository_with_a_commit(tmp_path, refused):
    (tmp_path / "model.py").write_text("# {}\n")
    refused(tmp_path, "run", "model.py:Net", words="run `git init` and make a first commit")
    git(tmp_path, "init", "-q")
    refused(tmp_path, "run", "model.py:Net", words="no commit yet")


def test_a_users_folders_called_like_ours_or_the_library_do_not_stand_in_for_them(workspace):
    for name in ("agent", "harness", "torch", "profile", "select", "kernels"):
        (workspace / name).mkdir()
        (workspace / name / "__init__.py").write_text("raise SystemExit('shadowed')")
    script = "import runpy; runpy.run_module('agent', run_name='__main__')"
    for command in ([sys.executable, "-P", "-m", "agent"], [sys.executable, "-P", "-c", script]):
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, "--help"], cwd=workspace, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    from agent.harness_client import search_path

    entries = ["", str(workspace), str(workspace / "libs"), str(ROOT), "/usr/lib/python3/dist-packages"]
    path = search_path(entries, workspace=workspace, with_user_code=True)
    assert path[0] == str(ROOT)
    assert path.index("/usr/lib/python3/dist-packages") < path.index(str(workspace / "libs"))
    assert path[-1] in {str(workspace), str(Path.cwd())}
    assert str(workspace) not in search_path(entries, workspace=workspace, with_user_code=False)


# Readers


def test_results_as_json_have_the_columns_with_numbers_as_numbers(finished):
    done = overnight(finished, "results", "--json")
    rows = json.loads(done.stdout)
    assert [tuple(row) for row in rows] == [COLUMNS] * 3
    assert [row["status"] for row in rows] == ["keep", "incorrect", "invalid_reply"]
    assert (rows[0]["speedup_vs_best"], rows[1]["latency_us"]) == (1.5, None)


def test_results_are_rebuilt_from_the_journal_byte_for_byte(finished):
    path = finished / "results.tsv"
    before = path.read_bytes()
    path.unlink()
    assert overnight(finished, "results", "--rebuild").returncode == 0
    assert path.read_bytes() == before


def test_status_says_what_was_done_and_that_nothing_runs(finished):
    state = json.loads(overnight(finished, "status", "--json").stdout)
    assert (state["session"], state["running"], state["experiments"]) == ("night", False, 3)
    assert state["by_status"] == {"keep": 1, "incorrect": 1, "invalid_reply": 1}
    assert state["kept"][0]["target"] == "rmsnorm_a"
    assert "not running" in overnight(finished, "status").stdout


def test_report_logs_and_stop_answer_for_a_finished_session(finished):
    report = overnight(finished, "report")
    assert "| 1 | keep | rmsnorm_a | 1.500x |" in report.stdout
    assert (finished / ".overnight/night/report.md").read_text() == report.stdout.rstrip("\n") + "\n"
    assert overnight(finished, "logs", "night").returncode == 0
    assert overnight(finished, "stop").returncode == 1


def test_a_target_of_a_session_is_known_and_a_wrong_one_lists_them(finished, refused):
    refused(finished, "check", "--target", "rmsnorm_c", "--kernel", "model.py", words="rmsnorm_a, softmax_b")
    refused(finished, "check", "--target", "x", "--kernel", "model.py", "--session", "day", words="there is night")


def test_a_crash_of_ours_is_exit_3_and_never_the_honest_no(finished):
    done = overnight(finished, "status", environment={"PYTHONHASHSEED": "0"})
    assert done.returncode == 0
    lock = finished / ".overnight/night/lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    done = overnight(finished, "status")
    lock.rmdir()
    assert done.returncode == 3
    assert "overnight: " in done.stderr


def test_init_makes_what_is_missing_and_leaves_what_is_there(workspace, refused):
    (workspace / "program.md").write_text("mine\n")
    assert overnight(workspace, "init").returncode == 0
    assert (workspace / "program.md").read_text() == "mine\n"
    assert (workspace / "results.tsv").read_text().split("\t")[0] == "experiment"
    assert overnight(workspace, "init").stdout.count("is there already") == 3
    refused(workspace, "run", "model.py:Net", "--proposer", "llm", words="--proposer llm needs a model")


# With the real harness


@pytest.mark.slow
def test_a_softmax_is_judged_by_its_named_op_and_the_exit_code_says_how(workspace):
    (workspace / "right.py").write_text("import torch\n\n\ndef kernel_fn(x):\n    return torch.softmax(x, dim=-1)\n")
    (workspace / "wrong.py").write_text("import torch\n\n\ndef kernel_fn(x):\n    return torch.zeros_like(x)\n")
    common = ("check", "--target", "softmax", "--device", "cpu", "--json", "--no-bench", "--kernel")
    right, wrong = overnight(workspace, *common, "right.py"), overnight(workspace, *common, "wrong.py")
    verdict = json.loads(right.stdout)
    assert (right.returncode, verdict["accepted"], verdict["status"]) == (0, True, "discard")
    assert list(verdict["stages"]) == ["smoke", "shapes", "stability", "determinism", "edge", "benchmark"]
    refusal = json.loads(wrong.stdout)
    assert (wrong.returncode, refusal["accepted"], refusal["blame"]) == (1, False, "candidate")
    assert git(workspace, "status", "--porcelain").splitlines() == ["?? right.py", "?? wrong.py"]


@pytest.mark.slow
def test_a_model_is_profiled_beside_folders_called_like_ours_and_nothing_is_left(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.linear = torch.nn.Linear(64, 64)\n"
        "    def forward(self, x):\n        return torch.softmax(self.linear(x), -1)\n"
    )
    for name in ("agent", "harness", "torch", "profile"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')")
    before = sorted(tmp_path.rglob("*"))
    done = overnight(
        tmp_path, "profile", "net.py:Net", "--input-shape", "8,64", "--device", "cpu", "--json", timeout=280
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0
    shares = sum(one["share"] for one in report["targets"] if not one["members"])
    assert shares + report["idle_share"] + report["uncaptured_share"] <= 1.0001
    keys = {"id", "kind", "call_sites", "share", "time_us", "floor_us", "flops", "bytes", "model_gain", "launch_bound"}
    assert all(keys <= set(one) for one in report["targets"])
    assert {"model", "device", "total_ms", "idle_share", "targets", "uncaptured_share"} <= set(report)
    assert sorted(tmp_path.rglob("*")) == before

"""Notifications: a hook and Apprise over real HTTP hear of the first win and the end; no failure harms the night."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from workspaces import drive, kernel, make_workspace, record, rows, start

from agent.config import load_config
from agent.errors import InputError
from agent.notify import SENDER, Messenger, News, addresses, check

SECRET = "s3cr3t-t0ken-of-the-user"
ONE = {"0001_rmsnorm_a__one.py": kernel("keep 1.5"), "0002_softmax_b__two.py": kernel("keep 1.2")}
HOOK = "import sys; open('told.jsonl', 'a').write(sys.stdin.read() + chr(10))"


def workspace_telling(folder, *entries, recordings=ONE):
    workspace = make_workspace(folder, recordings=recordings)
    (workspace / "hook.py").write_text(HOOK)
    (workspace / "overnight.yaml").write_text(json.dumps({"notify": list(entries)}))
    return workspace


def told(workspace, wanted, seconds=15):
    """What the hook was told, waiting for so many messages."""
    path, until = workspace / "told.jsonl", time.monotonic() + seconds
    while time.monotonic() < until:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= wanted:
            return [json.loads(line) for line in lines]
        time.sleep(0.05)
    raise AssertionError(f"told {lines}, wanted {wanted}")


HOOK_ENTRY = f"command:{sys.executable} hook.py"


def test_a_hook_is_told_of_the_first_win_and_of_the_end_in_json(tmp_path):
    workspace = workspace_telling(tmp_path, HOOK_ENTRY)
    drive(workspace, "run")
    messages = {one["event"]: one for one in told(workspace, 2)}
    win, finish = messages["first_win"], messages["finish"]
    assert (win["session"], win["target"], win["experiment"], win["speedup_vs_best"]) == ("night", "rmsnorm_a", 1, 1.5)
    assert "1.5 times as fast" in win["body"]
    assert (finish["ending"], finish["kept"], finish["against"]) == ("nothing left to try", 2, "torch.compile")
    assert finish["ci_low"] < finish["model_speedup"] < finish["ci_high"]


def test_the_first_win_is_told_once_over_all_resumes(tmp_path):
    workspace = workspace_telling(tmp_path, HOOK_ENTRY)
    drive(workspace, "run")
    record(workspace, "0003_rmsnorm_a__three.py", kernel("keep 1.1", name="three"))
    drive(workspace, "resume")
    events = sorted(one["event"] for one in told(workspace, 3))
    assert events == ["finish", "finish", "first_win"]


def test_a_stop_is_told_with_its_reason(tmp_path):
    trouble = {
        f"000{n}_{t}__x.py": kernel("environment", name=t + str(n))
        for n, t in enumerate(["rmsnorm_a", "softmax_b"] * 2, 1)
    }
    workspace = workspace_telling(tmp_path, HOOK_ENTRY, recordings=trouble)
    assert drive(workspace, "run", check=False).endswith("exit 3")
    (message,) = told(workspace, 1)
    assert message["event"] == "stop"
    assert "failed because of the machine" in message["reason"]


def test_a_stop_on_request_is_told_too(tmp_path):
    workspace = workspace_telling(
        tmp_path, HOOK_ENTRY, recordings={"0001_rmsnorm_a__slow.py": kernel("keep", "# slow: 30")}
    )
    process = start(workspace, "run")
    until = time.monotonic() + 15
    while not (workspace / ".overnight/night/judged.txt").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=15)
    (message,) = told(workspace, 1)
    assert (message["event"], message["reason"]) == ("stop", "stopped on request")


@pytest.fixture
def receiver():
    """A web server that keeps what is posted to it."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, posted
    server.shutdown()
    server.server_close()


def test_apprise_carries_the_message(tmp_path, receiver):
    pytest.importorskip("apprise")
    port, posted = receiver
    workspace = workspace_telling(
        tmp_path, f"json://127.0.0.1:{port}/{SECRET}/", recordings={"0001_rmsnorm_a__x.py": kernel()}
    )
    said = drive(workspace, "run")
    assert "could not" not in said
    until = time.monotonic() + 15
    while len(posted) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    titles = {path: sorted(one["title"] for at, one in posted if at == path) for path, _ in posted}
    assert titles == {f"/{SECRET}/": ["Overnight, night: first win", "Overnight, night: nothing left to try"]}


FAILING = [
    f"json://127.0.0.1:9/{SECRET}",  # nobody listens
    f"command:{sys.executable} -c 'import sys; sys.exit(\"{SECRET}\")'",
    f"command:/no/such/program {SECRET}",
    f"nonsense://{SECRET}@somewhere",
]


def test_failing_notifiers_are_named_without_their_secrets_and_change_nothing(tmp_path):
    quiet = make_workspace(tmp_path / "quiet", recordings=ONE)
    drive(quiet, "run")
    loud = workspace_telling(tmp_path / "loud", *FAILING)
    said = drive(loud, "run")
    for words in (
        "entry 1 of notify (json) could not be told: it refused or could not be reached",
        "entry 2 of notify (command) could not be told: the command failed",
        "entry 3 of notify (command) could not be told: the command cannot be run",
        "entry 4 of notify (nonsense) could not be told: it refused or could not be reached",
    ):
        assert words in said
    changing = {"timestamp", "commit"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in rows(loud)] == [
        {k: v for k, v in row.items() if k not in changing} for row in rows(quiet)
    ]
    assert SECRET not in said
    for path in (loud / ".overnight").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_notifier_that_hangs_delays_the_end_by_a_moment_only(tmp_path):
    workspace = workspace_telling(tmp_path, f"command:{sys.executable} -c 'import time; time.sleep(60)'")
    began = time.monotonic()
    said = drive(workspace, "run")
    assert time.monotonic() - began < 30
    assert [row["status"] for row in rows(workspace)] == ["keep", "keep"]
    assert "verified" in said
    assert "still being sent; it is given up after 30 s" in said


def test_a_file_with_a_mistake_is_said_and_the_night_goes_on(tmp_path):
    workspace = workspace_telling(tmp_path, f"ntfy:/{SECRET}")
    said = drive(workspace, "run")
    assert "nobody was told of it: entry 1 of notify must be an Apprise address" in said
    assert SECRET not in said
    (workspace / "overnight.yaml").write_text(f"notify: [{SECRET}")
    record(workspace, "0003_rmsnorm_a__three.py", kernel("keep 1.1", name="three"))
    said = drive(workspace, "resume")
    assert "is not readable YAML" in said
    assert SECRET not in said
    assert [row["status"] for row in rows(workspace)] == ["keep"] * 3


def test_a_message_that_cannot_be_sent_in_time_takes_all_its_processes_with_it(tmp_path):
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(987)'])"
    asked = {
        "addresses": [{"label": "entry 1 of notify (command)", "url": "", "argv": [sys.executable, "-c", sleeper]}],
        "news": {"event": "finish"},
        "limit_s": 2.0,
    }
    done = subprocess.run(
        [sys.executable, str(SENDER)],
        input=json.dumps(asked).encode(),
        capture_output=True,
        timeout=20,
        start_new_session=True,
    )
    assert json.loads(done.stdout) == ["entry 1 of notify (command) could not be told: it took too long"]
    time.sleep(0.2)
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "time.sleep(987)" in (one.info["cmdline"] or [])[-1:]
    ]


def test_a_message_leaves_no_process_unreaped(tmp_path):
    messenger = Messenger(tmp_path)
    messenger.tell(["command:true"], News("finish", "night", "t", "b"))
    assert messenger.complaints(20) == []
    assert [one for one in psutil.Process().children() if SENDER.name in " ".join(one.cmdline())] == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (SECRET, "entry 1 of notify must be an Apprise address"),
        (f"://{SECRET}", "must be an Apprise address"),
        ("ntfy://", "must be an Apprise address"),
        ("command:", "needs the program"),
        (f"command:'{SECRET}", "close its quotes"),
        ("ntfy://${NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_an_entry_that_is_none_is_refused_without_being_shown(entry, words):
    with pytest.raises(InputError, match=words) as refused:
        addresses([entry], {})
    assert SECRET not in str(refused.value)


def test_an_address_may_take_its_secret_from_the_environment_and_is_never_shown_whole():
    (one,) = addresses(["ntfys://${NTFY_TOKEN}@ntfy.sh/topic"], {"NTFY_TOKEN": SECRET})
    assert one.url == f"ntfys://{SECRET}@ntfy.sh/topic"
    assert SECRET not in repr(one)
    assert one.label == "entry 1 of notify (ntfys)"


def test_an_address_that_apprise_does_not_know_is_refused_before_the_night(tmp_path):
    pytest.importorskip("apprise")
    check(["ntfy://topic", "command:true"])
    with pytest.raises(InputError, match=r"entry 2 of notify \(nonsense\) is not an address"):
        check(["ntfy://topic", f"nonsense://{SECRET}"])


def test_settings_never_show_or_store_addresses(tmp_path):
    (tmp_path / "overnight.yaml").write_text(json.dumps({"notify": [f"ntfy://{SECRET}"]}))
    config = load_config(tmp_path)
    assert config.notify == [f"ntfy://{SECRET}"]
    assert SECRET not in repr(config) + config.model_dump_json()
    (tmp_path / "overnight.yaml").write_text(f"notify: {{a: {SECRET}}}")
    with pytest.raises(InputError) as refused:
        load_config(tmp_path)
    assert SECRET not in str(refused.value)


def test_the_sender_imports_nothing_of_ours():
    text = SENDER.read_text()
    assert SENDER.name == "notify_sender.py"
    assert "from agent" not in text
    assert "import agent" not in text

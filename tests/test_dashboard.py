"""The dashboard: live in a real browser beside a running session, read-only, closed to strangers, harmless, clear."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import hostile
import pytest
from browser import opened
from workspaces import ENVIRONMENT, drive, kernel, make_workspace, record, rows, start

REASON = "THE DASHBOARD IS NOT TESTED: pip install 'overnight[dashboard]'"
pytest.importorskip("starlette", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)

from agent.dashboard.access import Rules, is_local
from agent.dashboard.boards import boards, compare, search
from agent.dashboard.service import bind
from agent.dashboard.shelf import Shelf
from agent.errors import InputError
from agent.morning.night import read_night
from agent.places import SessionPlaces

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "a-token-that-is-long-enough"


def command(*arguments):
    return [sys.executable, "-P", str(ROOT / "agent" / "__main__.py"), "dashboard", *arguments]


@contextmanager
def serving(workspace, *arguments, environment=None):
    """The dashboard's process; yields its address, ends it, and checks that it ended well."""
    process = subprocess.Popen(
        command("--port", "0", "--json", *arguments),
        cwd=workspace,
        env={**ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        text = ""
        while "}" not in text:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            text += line
        yield json.loads(text)["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=15)
    assert process.returncode == 0, complaints
    assert "Traceback" not in complaints
    assert TOKEN not in complaints


def get(address, method="GET", **headers):
    """Status, headers and text of one request, redirects not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(address, method=method, headers=named)
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=15) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace with a finished session `night` full of hostile text."""
    return hostile.make_session(tmp_path_factory.mktemp("dashboard") / "workspace")


@pytest.fixture(scope="module")
def address(workspace):
    with serving(workspace) as found:
        yield found


# Live


def test_a_running_session_is_seen_live_and_its_diff_is_opened(chromium, tmp_path):
    workspace = make_workspace(
        tmp_path,
        recordings={
            "0001_rmsnorm_a__first.py": kernel("keep 1.5", name="first"),
            "0002_rmsnorm_a__second.py": kernel("keep 1.3", "# slow: 4", name="second"),
            "0003_softmax_b__third.py": kernel("incorrect", "# slow: 1", name="third"),
        },
    )
    process = start(workspace, "run")
    until = time.monotonic() + 20
    while not (workspace / ".overnight/night/judged.txt").exists() and time.monotonic() < until:
        time.sleep(0.05)
    with serving(workspace) as address, opened(chromium, f"{address}session/night") as watched:
        tab = watched.page
        tab.locator("#experiment-1 .badge.keep").wait_for()
        tab.locator("#experiment-1 summary").click()
        tab.locator("#experiment-1 pre").first.wait_for()
        tab.locator("#doing", has_text="experiment 2 on rmsnorm_a").wait_for()
        tab.locator("#experiment-2 .badge.keep").wait_for()
        assert tab.locator("#experiment-1 pre").first.is_visible()  # what was opened stays open
        tab.locator("#experiment-2 summary").click()
        tab.locator("#experiment-2 pre.diff .add", has_text="'second'").wait_for()
        tab.locator("#experiment-3 .badge.incorrect").wait_for()
        tab.locator(".hero .figure").wait_for()
        assert "1.111x" in tab.locator(".hero .figure").inner_text()
        assert "updated" in tab.locator("#live").inner_text()
        process.communicate(timeout=30)
        tab.locator("dd", has_text="not running").wait_for()
        watched.fine(allowed=address)
    assert process.returncode == 0
    assert [row["status"] for row in rows(workspace)] == ["keep", "keep", "incorrect"]


def test_a_session_that_begins_and_one_that_vanishes_are_seen(chromium, tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__x.py": kernel()})
    drive(workspace, "run")
    with serving(workspace) as address, opened(chromium, address) as watched:
        tab = watched.page
        tab.get_by_role("link", name="night", exact=True).wait_for()
        drive(workspace, "run", name="second")
        tab.get_by_role("link", name="second", exact=True).wait_for()
        shutil.rmtree(workspace / ".overnight/night")
        tab.get_by_role("link", name="night", exact=True).wait_for(state="detached")
        drive(workspace, "run", name="night", check=False)
        watched.fine(allowed=address)


def test_reading_neither_stops_nor_slows_a_writing_session(tmp_path):
    recordings = {f"{n:04d}_rmsnorm_a__v{n}.py": kernel("discard 0.9", name=f"v{n}") for n in range(1, 51)}
    workspace = make_workspace(tmp_path, recordings=recordings)
    process = start(workspace, "run")
    while not (workspace / ".overnight/night/profile.json").exists() and process.poll() is None:
        time.sleep(0.02)
    seen = []
    with serving(workspace) as address:
        while process.poll() is None:
            status, _, text = get(f"{address}api/session/night")
            assert status == 200, text
            seen.append(json.loads(text)["experiments"])
            assert get(f"{address}session/night")[0] == 200
        process.communicate(timeout=30)
        assert json.loads(get(f"{address}api/session/night")[2])["experiments"] == 50
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert len(rows(workspace)) == 50


def test_a_broken_session_is_named_and_the_others_are_shown(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__x.py": kernel()})
    drive(workspace, "run")
    hostile_name = "<img src=x onerror=alert(1)>%2f.."
    for name in ("newer", "torn", "rotten", "odd", hostile_name):
        shutil.copytree(workspace / ".overnight/night", workspace / ".overnight" / name, symlinks=True)
    with sqlite3.connect(workspace / ".overnight/newer/journal.sqlite") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    (workspace / ".overnight/torn/journal.sqlite").write_bytes(b"no database at all" * 100)
    hole = bytearray((workspace / ".overnight/rotten/journal.sqlite").read_bytes())
    hole[4096:] = os.urandom(len(hole) - 4096)
    (workspace / ".overnight/rotten/journal.sqlite").write_bytes(hole)
    (workspace / ".overnight/odd/profile.json").write_text('{"model": 1}')
    with serving(workspace) as address:
        status, _, text = get(address)
        assert status == 200
        assert "update Overnight" in text
        assert "torn/journal.sqlite cannot be opened" in text
        assert "1.111x" in text
        assert "odd/profile.json is damaged" in text
        assert "<img" not in text
        assert get(f"{address}session/{urllib.parse.quote(hostile_name, safe='')}")[0] == 200
        broken = ("newer", "torn", "rotten", "odd")
        assert [get(f"{address}session/{name}")[0] for name in broken] == [503] * 4


# Harmless


PAGES = (
    "", "session/night", "session/night?all", "session/night/experiment/1", "session/night/experiment/5", "kernels",
    "search?q=" + urllib.parse.quote(hostile.SCRIPT), "compare?a=night:1&b=night:2", "compare?a=night:3&b=night:6",
    "nothing/here", "session/" + urllib.parse.quote(hostile.SCRIPT, safe=""), "search?q=%00%ff%1b",
    "compare?a=" + urllib.parse.quote(hostile.BREAK_OUT) + "&b=", "kernels?target=" + urllib.parse.quote(hostile.IMAGE),
)  # fmt: skip


def test_nothing_that_a_candidate_or_an_address_says_runs_or_loads(chromium, address):
    with opened(chromium, address) as watched:
        for path in PAGES:
            watched.page.goto(address + path)
            check_harmless(watched.page)
        assert [one for one in watched.complaints if "status of 404" not in one] == []
        assert all(url.startswith((address, "data:")) for url in watched.requests)


def check_harmless(tab):
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    tab.wait_for_timeout(100)
    assert tab.locator("script").count() == 1
    for selector in (
        "img",
        "iframe",
        "[onload]",
        "[onerror]",
        "a[href^=javascript]",
        "a[href^='http://evil']",
        "[style]",
    ):
        assert tab.locator(selector).count() == 0, selector
    assert "owned" not in tab.title().replace(hostile.SCRIPT, "")


BEYOND = (
    "session/..%2f..%2f..%2fetc%2fpasswd",
    "session/%2e%2e",
    "session/night/experiment/..%2f1",
    "static/..%2fparts.html.j2",
    "static/%2e%2e%2f%2e%2e%2fservice.py",
    "session/night/experiment/99999999999999999999",
    "session/night/experiment/-1",
    "session/.",
    "api/session/..",
    "static/report.html.j2",
    "compare?a=../../etc:1&b=night:1",
    "compare?a=night:9999&b=night:1",
    "compare?a=night:" + "9" * 400 + "&b=night:1",
    "session/night%00",
)


@pytest.mark.parametrize("path", BEYOND)
def test_no_address_reaches_beyond_the_sessions(address, path):
    status, _, text = get(address + path)
    assert status == 404, text
    assert "root:" not in text
    assert "Traceback" not in text


def test_every_answer_carries_the_strict_headers(address):
    for path in ("", "session/night", "static/overnight.css", "api/sessions", "nothing"):
        _, headers, _ = get(address + path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers


# Read-only and closed


def test_it_is_read_only(address, workspace):
    before = {path: path.read_bytes() for path in (workspace / ".overnight/night").glob("*.*") if path.is_file()}
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = get(address + "session/night", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    for path in PAGES:
        get(address + path)
    kept = {path: content for path, content in before.items() if path.suffix != ".sqlite-shm"}
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_name_that_was_pointed_here_is_refused(address):
    port = address.rsplit(":", 1)[1].strip("/")
    assert get(address, Host=f"evil.example:{port}")[0] == 421
    assert get(address, Host=f"localhost:{port}")[0] == 200
    assert get(address, Host=f"[::1]:{port}")[0] == 200
    assert get(address, Host="127.0.0.1.evil.example")[0] == 421


def test_bound_elsewhere_it_needs_its_token(chromium, workspace):
    with serving(workspace, "--host", "0.0.0.0", environment={"OVERNIGHT_DASHBOARD_TOKEN": TOKEN}) as shown:
        assert shown.endswith(f"/?token={TOKEN}")
        port = re.search(r":(\d+)/", shown)[1]
        address = f"http://127.0.0.1:{port}/"
        for path in ("", "session/night", "events", "static/overnight.css", "api/sessions", "?token=", "?token=wrong"):
            assert get(address + path)[0] == 401, path
        assert get(address, Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(address, Cookie=f"overnight-{port}=guess")[0] == 401
        status, headers, _ = get(f"{address}kernels?token={TOKEN}&target=x%26y")
        assert (status, headers["location"]) == (303, "/kernels?target=x%26y")
        assert all(words in headers["set-cookie"] for words in ("HttpOnly", "SameSite=Strict"))
        assert TOKEN not in headers["set-cookie"]
        assert get(f"{address}/evil.example/?token={TOKEN}")[1]["location"] == "/evil.example/"
        with opened(chromium, f"{address}session/night?token={TOKEN}") as watched:
            assert watched.page.url == f"{address}session/night"
            watched.page.locator("#live", has_text="live").wait_for()
            watched.fine(allowed=address)


def test_a_token_is_made_where_none_is_given():
    bound = [bind("0.0.0.0", 0, None), bind("0.0.0.0", 0, None), bind("127.0.0.1", 0, None)]
    for one in bound:
        one.socket.close()
    tokens = [one.address.partition("?token=")[2] for one in bound]
    assert tokens[2] == ""
    assert len(set(tokens[:2])) == 2
    assert all(len(token) >= 32 for token in tokens[:2])
    assert not any(token in repr(one) for token, one in zip(tokens[:2], bound, strict=False))


@pytest.mark.parametrize(
    ("header", "known"),
    [
        *((one, True) for one in ("localhost", "LOCALHOST:1", "127.0.0.2:80", "[::1]:80", "my-host:80")),
        *((one, False) for one in ("", "a.b", "localhost.evil.example", "0x7f.1", "my-host.evil:80")),
    ],
)  # fmt: skip
def test_hosts_that_name_this_machine(header, known):
    assert Rules("my-host", 80).knows_host(header) is known
    assert is_local("::1")
    assert not is_local("10.0.0.1")


# Refusals


def refused(workspace, *arguments, environment=None):
    done = subprocess.run(
        command(*arguments),
        cwd=workspace,
        env={**ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_port_in_use_names_the_remedy(workspace):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, words = refused(workspace, "--port", str(taken.getsockname()[1]))
    assert code == 3
    assert "is in use: choose another with --port, or --port 0" in words


def test_without_a_session_it_says_how_to_start_one(tmp_path):
    code, words = refused(make_workspace(tmp_path))
    assert (code, "overnight run MODEL" in words) == (2, True)


def test_no_such_host_and_a_weak_token_are_said():
    for host in ("203.0.113.7", "no such host", "x" * 300):
        with pytest.raises(InputError, match="is no address of this machine"):
            bind(host, 0, None)
    for weak in ("short", "with a \n in the middle of it", "é" * 20):
        with pytest.raises(InputError, match="at least 16") as said:
            bind("127.0.0.1", 0, weak)
        assert weak not in str(said.value)


def test_without_its_extra_it_says_how_to_install_it(workspace, tmp_path):
    """A Python that does not see site-packages' starlette: a file in its place that cannot be imported."""
    (tmp_path / "starlette.py").write_text("raise ImportError('not installed')\n")
    code, words = refused(workspace, environment={"PYTHONPATH": str(tmp_path)})
    assert code == 3
    assert "pip install 'overnight[dashboard]'" in words


# Several sessions


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    workspace = make_workspace(
        tmp_path_factory.mktemp("several"),
        recordings={
            "0001_rmsnorm_a__plain.py": kernel("keep 1.5", name="plain"),
            "0002_rmsnorm_a__tuned rows.py": kernel("keep 1.2", name="tuned"),
            "0003_rmsnorm_a__worse.py": kernel("discard 0.8", name="worse"),
            "0004_rmsnorm_a__wrong.py": kernel("incorrect", name="wrong"),
        },
    )
    drive(workspace, "run")
    record(workspace, "0005_softmax_b__online.py", kernel("keep 2.0", name="online"))
    drive(workspace, "run", name="second")
    return [read_night(SessionPlaces(workspace, name)) for name in ("night", "second")]


def test_the_leaderboard_ranks_accepted_kernels_of_all_sessions_by_target_and_device(nights):
    rmsnorm, softmax = boards(nights)
    assert (rmsnorm.target, rmsnorm.device, softmax.target) == ("rmsnorm_a", "scripted", "softmax_b")
    assert [(one.session, one.trial.number) for one in rmsnorm.entries[:2]] == [("night", 1), ("second", 1)]
    assert {one.trial.status for one in rmsnorm.entries} == {"keep", "discard"}
    tuned = next(one for one in rmsnorm.entries if one.trial.number == 2)
    assert [parent.number for parent in tuned.lineage] == [1]


def test_a_search_finds_words_in_code_description_and_verdict(nights):
    hits, count = search(nights, "TUNED rows")
    assert (count, {(hit.session, hit.trial.number) for hit in hits}) == (2, {("night", 2), ("second", 2)})
    assert search(nights, "incorrect")[1] == 2
    assert search(nights, "kernel_fn rmsnorm_a")[1] == 8
    assert search(nights, "  ") == ((), 0)
    assert search(nights, "nowhere")[1] == 0


def test_a_comparison_uses_the_best_evidence_and_says_which(nights):
    night, second = nights
    raced = compare(night, night.trial(1), night, night.trial(2))
    assert (raced.ratio, raced.how) == (1.2, "They were timed in turns on one device.")
    assert (raced.added, raced.removed) == (2, 2)
    assert "same kernel" in compare(night, night.trial(3), night, night.trial(3)).how
    assert "different moments" in compare(night, night.trial(1), second, second.trial(2)).how
    assert compare(night, night.trial(1), second, second.trial(5)).ratio is None
    assert compare(night, night.trial(1), night, night.trial(4)).how == "They were not both timed."


def test_the_shelf_reads_only_what_changed(tmp_path):
    workspace = make_workspace(tmp_path, recordings={"0001_rmsnorm_a__x.py": kernel()})
    drive(workspace, "run")
    shelf = Shelf(workspace)
    first = shelf.night("night")
    assert shelf.night("night") is first
    record(workspace, "0002_softmax_b__y.py", kernel("keep 1.1", name="y"))
    drive(workspace, "resume")
    later = shelf.night("night")
    assert [one.number for one in later.trials] == [1, 2]
    assert later.trials[0].experiment is first.trials[0].experiment


def test_two_kernels_are_chosen_and_compared(chromium, address):
    with opened(chromium, f"{address}kernels") as watched:
        tab = watched.page
        tab.get_by_label("a: night:1").check()
        tab.get_by_label("b: night:2").check()
        tab.get_by_role("button", name="Compare the two chosen").click()
        tab.locator("pre.diff .add", has_text="vectorised").wait_for()
        assert "1.200 times as fast" in tab.locator("main").inner_text()
        watched.fine(allowed=address)


def test_it_fits_a_phone(chromium, address):
    for path in (
        "",
        "session/night",
        "session/night/experiment/2",
        "kernels",
        "search?q=keep",
        "compare?a=night:1&b=night:2",
    ):
        with opened(chromium, address + path, viewport={"width": 360, "height": 740}) as watched:
            watched.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            watched.page.wait_for_timeout(200)
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360, path

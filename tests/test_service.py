"""A session as a service: a terminal that goes away, a pipe nobody reads, a user unit, files that cannot be written."""

import os
import pty
import shutil
import subprocess
import sys

import pytest
from test_cli import overnight
from test_session import judging, wait_for
from workspaces import DRIVER, ENVIRONMENT, drive, kernel, make_workspace, rows

from agent.unit import unit_name, unit_text

FOUR = {
    f"{number:04d}_rmsnorm_a__n{number}.py": kernel("discard 1", "# slow: 0.3", name=str(number))
    for number in range(1, 5)
}
SAYING = """
import sys
sys.path.insert(0, {root!r})
from agent.progress import Progress
with Progress() as progress:
    for number in range(50):
        progress.say("line " + "x" * 2000)
        progress.event("progress", {{"message": "on"}})
open({done!r}, "w").close()
"""
ROOT = DRIVER.parent.parent


def test_a_session_goes_on_when_nobody_reads_what_it_says(tmp_path):
    script = SAYING.format(root=str(ROOT), done=str(tmp_path / "done"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "done").exists()


def test_a_terminal_that_is_closed_ends_no_line_of_the_night_in_a_crash(tmp_path):
    master, slave = pty.openpty()
    script = SAYING.format(root=str(ROOT), done=str(tmp_path / "done"))
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'closed')!r}): time.sleep(0.05)\n"
    process = subprocess.Popen([sys.executable, "-c", wait + script], stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    os.close(master)
    (tmp_path / "closed").touch()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "done").exists()


def test_the_user_unit_names_this_python_this_workspace_and_no_key(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path / "my 100% model")
    config = tmp_path / "config"
    environment = {"XDG_CONFIG_HOME": str(config), "OPENAI_API_KEY": "sk-not-to-be-written-anywhere"}
    done = overnight(workspace, "init", "--systemd", environment=environment)
    assert done.returncode == 0, done.stderr
    unit = config / "systemd" / "user" / unit_name(workspace)
    text = unit.read_text()
    assert f'ExecStart="{sys.executable}" -P' in text
    assert "my 100%% model" in text
    assert "sk-not" not in text
    assert f"{unit}: made" in done.stdout
    assert "loginctl enable-linger" in done.stdout
    assert "is there already" in overnight(workspace, "init", "--systemd", environment=environment).stdout
    if shutil.which("systemd-analyze"):
        one = unit.with_name(unit.name.replace("@", "@night"))
        one.write_text(text)
        said = subprocess.run(
            ["systemd-analyze", "verify", "--user", str(one)], capture_output=True, text=True, timeout=60,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
        ours = [line for line in said.stderr.splitlines() if one.name in line]
        assert ours == []
    unit.write_text("[Unit]\nDescription=somebody's\n")
    refused = overnight(workspace, "init", "--systemd", environment=environment)
    assert (refused.returncode, "not ours" in refused.stderr) == (2, True)


def test_a_unit_says_nothing_that_systemd_would_expand(tmp_path):
    text = unit_text(tmp_path / "a%b$c")
    assert "a%%b" in text
    assert " %i " in text


@pytest.mark.parametrize("read_only", ["results.tsv", ".overnight/night"])
def test_files_that_become_read_only_stop_the_night_resumably(tmp_path, read_only):
    """A read-only bind mount in a namespace of its own: permissions alone do not stop root."""
    workspace = make_workspace(tmp_path / "w", recordings=FOUR)
    drive(workspace, "run", "--experiments", "1")
    place = workspace / read_only
    mounting = f'mount --bind "{place}" "{place}" && mount -o remount,bind,ro "{place}" && exec "$@"'
    command = [sys.executable, str(DRIVER), "resume", str(workspace), "night", "--experiments", "9"]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounting, "sh", *command],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "ead-only" in said or "readonly" in said, said
    drive(workspace, "resume", "--experiments", "9")
    assert [row["status"] for row in rows(workspace)] == ["discard"] * 4


def test_a_full_disk_stops_before_an_experiment_and_resumes(tmp_path):
    workspace = make_workspace(tmp_path / "w", recordings=FOUR)
    drive(workspace, "run", "--experiments", "1")
    small, state = tmp_path / "small", workspace / ".overnight"
    small.mkdir()
    fill = (
        f'mount -t tmpfs -o size=8m none "{small}" && cp -a "{state}/." "{small}" && mount --bind "{small}" "{state}"'
        f' && head -c $(($(df --output=avail -B1 "{state}" | tail -1) - 250000)) /dev/zero > "{state}/filler" ;'
        f' "$@"; code=$?; rm "{state}/filler"; "$@" && '
        f'cp -a "{state}/." "{tmp_path}/after"; exit $code'
    )
    (tmp_path / "after").mkdir()
    command = [sys.executable, str(DRIVER), "resume", str(workspace), "night", "--experiments", "9"]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", fill, "sh", *command],
        capture_output=True, text=True, env={**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}, timeout=100,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "MB are free on the disk of" in done.stderr or "space" in done.stderr
    assert [row["status"] for row in rows(workspace)] == ["discard"] * 4


def test_logs_follow_to_the_last_line(tmp_path):
    workspace = make_workspace(tmp_path, recordings=FOUR)
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), "run", str(workspace), "night", "--detached"],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=ENVIRONMENT,
    )  # fmt: skip
    wait_for(lambda: judging(workspace))
    log = workspace / ".overnight/night/log.txt"
    with log.open("a") as file:
        file.write("the first line\n")
    following = subprocess.Popen(
        [sys.executable, "-P", "-m", "agent", "logs", "-f"], cwd=workspace, stdout=subprocess.PIPE, text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.wait(timeout=60) == 0
    said, _ = following.communicate(timeout=30)
    assert "the first line" in said

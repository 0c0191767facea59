"""Git workspaces with a scripted model and recordings, for tests of the session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DRIVER = Path(__file__).resolve().parent / "drive_session.py"
TARGETS = {"rmsnorm_a": 0.4, "softmax_b": 0.3}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, env=ENVIRONMENT, timeout=60
    )
    return done.stdout.strip()


def make_workspace(folder: Path, *, script: dict | None = None, recordings: dict[str, str] | None = None) -> Path:
    """A repository with one commit: a scripted model; recordings are not under version control."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "Night Owl")
    git(folder, "config", "user.email", "owl@example.org")
    (folder / "model.py").write_text(f"# {json.dumps(script or {'targets': TARGETS})}\n")
    git(folder, "add", "model.py")
    git(folder, "commit", "-q", "-m", "Model")
    for name, source in (recordings or {}).items():
        record(folder, name, source)
    return folder


def record(folder: Path, name: str, source: str) -> None:
    (folder / "recordings").mkdir(exist_ok=True)
    (folder / "recordings" / name).write_bytes(source.encode())


def kernel(verdict: str = "keep 1.5", *lines: str, name: str = "x") -> str:
    """A recording whose verdict the scripted judge reads off it."""
    return "\n".join([f"# verdict: {verdict}", *lines, "def kernel_fn(x):", f"    return {name!r}", ""])


def drive(
    folder: Path,
    verb: str,
    *arguments: str,
    name: str = "night",
    check: bool = True,
    before: Callable[[], None] | None = None,
) -> str:
    """Run the supervisor to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), verb, str(folder), name, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
        preexec_fn=before,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr + f"\nexit {done.returncode}"


def start(folder: Path, verb: str, *arguments: str, name: str = "night", output: int = subprocess.PIPE):
    """Start the supervisor and return at once."""
    return subprocess.Popen(
        [sys.executable, str(DRIVER), verb, str(folder), name, *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


def rows(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "results.tsv").read_text().splitlines()
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]


def state_of(folder: Path) -> dict[str, object]:
    """All that a session must not change: HEAD, the index's bytes, every file outside .overnight and results.tsv."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", ".overnight"} & set(path.relative_to(folder).parts)
    }
    files.pop("results.tsv", None)
    return {"head": git(folder, "rev-parse", "HEAD"), "index": (folder / ".git" / "index").read_bytes(), **files}

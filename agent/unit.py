"""A systemd user unit that resumes sessions of one workspace, also after a reboot; a clean end is not started again."""

import os
import re
import sys
from pathlib import Path

from agent.errors import InputError
from agent.harness_client import PACKAGE_ROOT
from agent.places import write_whole

MARK = "# made by `overnight init --systemd`"


def unit_name(root: Path) -> str:
    """The template unit of a workspace; the instance is a session's name."""
    return f"overnight-{re.sub(r'[^A-Za-z0-9_-]', '-', root.name) or 'workspace'}@.service"


def unit_text(root: Path) -> str:
    """What systemd is told."""
    entry = PACKAGE_ROOT / "agent" / "__main__.py"
    return f"""{MARK}
[Unit]
Description=Overnight session %i of {_escaped(str(root))}
StartLimitIntervalSec=1h
StartLimitBurst=5

[Service]
WorkingDirectory={_escaped(str(root))}
ExecStart="{_quoted(sys.executable)}" -P "{_quoted(str(entry))}" resume %i --in-background
Environment="PATH={_quoted(os.environ.get("PATH", "/usr/bin:/bin"))}" PYTHONUNBUFFERED=1
KillMode=mixed
TimeoutStopSec=60
Restart=on-abnormal
RestartSec=30

[Install]
WantedBy=default.target
"""


def _escaped(text: str) -> str:
    """Percent signs are systemd's own."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return _escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")


def write_unit(root: Path) -> tuple[Path, bool]:
    """Make it; returns its path and whether anything changed. Raises InputError for a file that is not ours."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    path, text = folder / unit_name(root), unit_text(root)
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if before and not before.startswith(MARK):
        raise InputError(f"{path} is there already and not ours: move it away, then start again.")
    if before and f"WorkingDirectory={_escaped(str(root))}\n" not in before:
        raise InputError(f"{path} is the unit of another workspace of this name: remove it, or rename this folder.")
    if before == text:
        return path, False
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path, True


def unit_advice(root: Path) -> list[str]:
    """What to do with it."""
    instance = unit_name(root).replace("@.service", "@SESSION")
    return [
        f"resume a session as a service:  systemctl --user daemon-reload && systemctl --user start {instance}",
        f"also after a reboot:            systemctl --user enable {instance} && loginctl enable-linger",
        f"what it says, how it stops:     journalctl --user -u {instance} -f, systemctl --user stop {instance}",
        "keys for language models:       systemctl --user edit adds Environment= lines; none is written here",
    ]

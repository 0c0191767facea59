"""The process that sends one message: addresses and message on standard input, what failed as JSON on standard output.

Started by its path, imports nothing of ours. It ends itself, and every command it has started, after `limit_s`.
What Apprise or a command prints is dropped, because it may name the address.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from typing import Any

OVERDUE = ": it took too long"
QUIET = subprocess.DEVNULL
SHARE_OF_ONE = 0.8  # of the time that is left, so that one silent receiver does not cost the others theirs


def main() -> int:
    """Send, say what failed."""
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    news = request["news"]
    result = _check(request["addresses"]) if news is None else _send_all(request, news)
    with os.fdopen(answers, "w") as output:
        json.dump(result, output)
    if OVERDUE in str(result):
        _give_up(0, None)  # what a command that took too long has started goes with it
    return 0


def _give_up(_number: int, _frame: Any) -> None:
    os.killpg(0, signal.SIGKILL)


def _check(addresses: list[dict[str, Any]]) -> Any:
    try:
        import apprise
    except ImportError:
        return "no apprise"
    wanted = [(place, one["url"]) for place, one in enumerate(addresses) if one["url"]]
    return [place for place, url in wanted if not apprise.Apprise().add(url)]


def _send_all(request: dict[str, Any], news: dict[str, Any]) -> list[str]:
    """Commands first, since they wait for nobody; each receiver in a process of its own, all at the same time."""
    children = []
    for one in sorted(request["addresses"], key=lambda address: not address["argv"]):
        child = os.fork()
        if child == 0:
            os._exit(_send(one, news, request["limit_s"] * SHARE_OF_ONE))
        children.append((child, one["label"]))
    failed = []
    for child, label in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            failed.append(f"{label} could not be told{REASONS.get(code, '')}")
    return failed


REASONS = {
    2: ": Apprise is not installed (pip install 'overnight[notify]')",
    3: ": it refused or could not be reached",
    4: ": the command cannot be run",
    5: ": the command failed",
    6: OVERDUE,
}


def _send(one: dict[str, Any], news: dict[str, Any], limit_s: float) -> int:
    """An exit code: 0 told, else a key of REASONS."""
    try:
        if one["argv"]:
            return _run(one["argv"], news, limit_s)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(6))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        import apprise

        channel = apprise.Apprise()
        ready = channel.add(one["url"]) and channel.notify(title=news["title"], body=news["body"], body_format="text")
    except ImportError:
        return 2
    except Exception:  # noqa: BLE001 - the process's top frame: a plugin may raise anything, with the address in it
        return 3
    return 0 if ready else 3


def _run(argv: list[str], news: dict[str, Any], limit_s: float) -> int:
    text = json.dumps(news).encode()
    try:
        done = subprocess.run(argv, input=text, stdout=QUIET, stderr=QUIET, timeout=limit_s, check=False)
    except OSError:
        return 4
    except subprocess.TimeoutExpired:
        return 6
    return 5 if done.returncode else 0


if __name__ == "__main__":
    raise SystemExit(main())

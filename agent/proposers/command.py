"""Any program as a proposer, such as a headless coding agent: prompt on standard input, kernel file on standard output.

The program runs with the user's own rights and environment, in an empty folder of its own; this does not contain it.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agent.errors import InputError, ProviderError, StopRequestedError
from agent.proposers.prompt import prompt_for
from agent.proposers.replies import backend_of, kernel_file_in
from agent.records import Brief, Candidate, Command, InvalidReply, Proposal, Usage

REPLY_LIMIT_BYTES = 4 << 20
SAID_CHARS = 300
POLL_S = 0.1


class CommandProposer:
    """Runs the program once for each proposal."""

    name = "command"

    def __init__(self, command: Command, stop: Callable[[], bool] = lambda: False) -> None:
        if not command.argv:
            raise InputError(
                "--proposer command needs --command 'PROGRAM ARGUMENTS' or command.argv in overnight.yaml."
            )
        program = shutil.which(command.argv[0])
        if program is None:
            raise InputError(f"--command: there is no program {command.argv[0]} here or on the PATH.")
        self._command = replace(command, argv=(str(Path(program).absolute()), *command.argv[1:]))
        self._stop = stop

    def propose(self, brief: Brief) -> Proposal:
        """Ask it. Raises ProviderError when it fails; a reply without a kernel, or none in time, is an InvalidReply."""
        prompt = prompt_for(brief)
        with tempfile.TemporaryDirectory(prefix="overnight-command-") as folder:
            reply = self._run(prompt, Path(folder))
        source = kernel_file_in(reply) if reply is not None else None
        if source is None:
            late = f"no reply within {self._command.timeout_s:.0f} s"
            reason = late if reply is None else f"no kernel_fn in the reply: {' '.join(reply.split())[:SAID_CHARS]!r}"
            return InvalidReply(brief.target.id, self.name, reason, prompt, reply or "", Usage(calls=1, cost_usd=None))
        return Candidate(
            target=brief.target.id,
            backend=backend_of(source),
            source=source,
            description=f"from {Path(self._command.argv[0]).name}",
            proposer=self.name,
            prompt=prompt,
            reply=reply or "",
            usage=Usage(calls=1, cost_usd=None),
            parents=brief.plan.parents,
        )

    def _run(self, prompt: str, folder: Path) -> str | None:
        """Standard output, None after the time limit."""
        asked, answered, complained = folder / "prompt", folder / "reply", folder / "errors"
        asked.write_text(prompt, encoding="utf-8")
        (folder / "work").mkdir()
        with asked.open("rb") as stdin, answered.open("wb") as stdout, complained.open("wb") as stderr:
            process = subprocess.Popen(
                self._command.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder / "work",
                start_new_session=True,
            )
            try:
                in_time = self._wait(process, answered)
            finally:
                _end(process)
        if not in_time:
            return None
        if process.returncode != 0:
            said = complained.read_text(encoding="utf-8", errors="replace").strip()[-SAID_CHARS:]
            words = f"exit code {process.returncode}: {said or 'it printed nothing on standard error'}."
            raise ProviderError(f"{self._command.argv[0]} ended with {words}")
        return answered.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: "subprocess.Popen[bytes]", answered: Path) -> bool:
        deadline = time.monotonic() + self._command.timeout_s
        while process.poll() is None:
            if self._stop():
                raise StopRequestedError
            if answered.stat().st_size > REPLY_LIMIT_BYTES:
                raise ProviderError(f"{self._command.argv[0]} printed more than {REPLY_LIMIT_BYTES >> 20} MiB.")
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)

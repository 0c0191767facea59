"""The command line: every command parses, calls one verb and maps its answer to an exit code.

Exit 0 yes, 1 the honest no, 2 the user's input, 3 the environment or ourselves. Nothing heavy is imported before a
command needs it.
"""

import errno
import sys
import traceback
from collections.abc import Sequence

import typer

from agent import cli_measure, cli_read, cli_session
from agent.errors import OvernightError, StopRequestedError

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Makes a PyTorch model faster while you sleep: profile, propose, judge, keep or revert.",
)
for command in (
    cli_read.init,
    cli_read.doctor,
    cli_measure.profile,
    cli_session.run,
    cli_session.resume,
    cli_read.status,
    cli_session.stop,
    cli_read.logs,
    cli_read.results,
    cli_read.report,
    cli_session.verify,
    cli_measure.check,
):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the `overnight` command: failures become one sentence and their exit code."""
    try:
        app(arguments)
    except OvernightError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        what = "there is no space left: free some" if error.errno in FULL_DISK else "the machine refused"
        _fail(f"{what} ({error}).", 3)
    except (KeyboardInterrupt, StopRequestedError):
        _fail("stopped.", 3)
    except Exception as error:  # noqa: BLE001 - the process's top frame: exit 1 is the honest no, never a crash of ours
        traceback.print_exc()
        _fail(f"this is our fault, please report it: {type(error).__name__}: {error}", 3)


def _fail(sentence: str, code: int) -> None:
    print(f"overnight: {sentence}", file=sys.stderr)
    raise SystemExit(code)

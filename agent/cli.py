"""The command line: every command parses, calls one verb and maps its answer to an exit code.

Exit 0 yes, 1 the honest no, 2 the user's input, 3 the environment or ourselves. Nothing heavy is imported before a
command needs it.
"""

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from agent import (
    cli_handover,
    cli_kernelbench,
    cli_measure,
    cli_morning,
    cli_read,
    cli_redteam,
    cli_session,
    cli_steering,
)
from agent.errors import OvernightError, StopRequestedError
from agent.visible import visible

FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
# A wrong option or a missing argument; typer has its own copy of this class in some versions, click's in others.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

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
    cli_steering.pause,
    cli_steering.skip,
    cli_steering.pin,
    cli_read.logs,
    cli_read.results,
    cli_morning.report,
    cli_morning.dashboard,
    cli_session.verify,
    cli_handover.apply,
    cli_handover.export,
    cli_measure.check,
    cli_redteam.redteam,
    cli_kernelbench.kernelbench,
):
    app.command()(command)
app.command("try")(cli_steering.try_kernel)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the `overnight` command: failures become one sentence and their exit code."""
    try:
        code = app(arguments, prog_name="overnight", standalone_mode=False)
    except UsageError as error:
        _refuse_usage(error)
    except OvernightError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(_machine_sentence(error), 3)
    except (KeyboardInterrupt, StopRequestedError, typer.Abort):
        _fail("stopped.", 3)
    except Exception as error:  # noqa: BLE001 - the process's top frame: exit 1 is the honest no, never a crash of ours
        traceback.print_exc()
        _fail(f"this is our fault, please report it: {type(error).__name__}: {error}", 3)
    raise SystemExit(code if isinstance(code, int) else 0)


def _refuse_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        raise SystemExit(2)
    command = error.ctx.command_path if error.ctx else "overnight"
    _fail(f"{' '.join(error.format_message().split()).rstrip('.')}: see `{command} --help`.", 2)


def _machine_sentence(error: OSError) -> str:
    if error.errno in FULL_DISK:
        return f"there is no space left: free some ({error})."
    if error.errno in NOT_WRITABLE:
        return (
            f"{error.filename or 'a file'} cannot be read or written: give yourself the right to it ({error.strerror})."
        )
    return f"the machine refused ({error})."


def _fail(sentence: str, code: int) -> None:
    print(f"overnight: {visible(sentence)}", file=sys.stderr)
    raise SystemExit(code)

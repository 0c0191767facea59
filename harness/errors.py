"""Failures with somebody to blame: the user's input (exit 2), the environment (exit 3), ourselves (exit 3)."""


class OvernightError(Exception):
    """A failure whose message names the thing and the remedy in one sentence."""

    kind = "ours"
    exit_code = 3


class InputError(OvernightError):
    """The user gave something that cannot be used as it is."""

    kind = "input"
    exit_code = 2


class MachineError(OvernightError):
    """The machine, not the user or a candidate: no compiler, no space, no device."""

    kind = "environment"
    exit_code = 3


class NoDeviceError(MachineError):
    """The device that was asked for is not there."""


class OursError(OvernightError):
    """Overnight's own fault; the message asks for a report."""


def from_kind(kind: str, message: str) -> OvernightError:
    """Rebuild the exception that another process reported."""
    classes = {"input": InputError, "environment": MachineError}
    return classes.get(kind, OursError)(message)

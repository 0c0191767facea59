"""What can stop a session, beyond the failures that harness and agent share."""

from harness.errors import InputError, MachineError, OursError, OvernightError

__all__ = [
    "BudgetReachedError",
    "InputError",
    "MachineError",
    "OursError",
    "OvernightError",
    "ProviderError",
    "StopRequestedError",
]


class ProviderError(MachineError):
    """A proposer cannot go on (no credit, no server, no key); the session stops and can be resumed."""


class BudgetReachedError(Exception):
    """A proposal would cost more than is left; the night ends as at any other limit."""


class StopRequestedError(Exception):
    """The user asked for a clean stop (Ctrl-C, SIGTERM, `overnight stop`): not a failure, caught in one place."""

"""Defines the errors that a user can cause, and the exit codes of every command.

Leaves out programming errors: those keep their traceback.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

EXIT_OK = 0
EXIT_FAILED = 1  # a row that could run did not
EXIT_USAGE = 2  # bad flags or bad input: nothing was measured
EXIT_SIGNAL = 128  # and the number of the signal that ended it, as shells report it
EXIT_INTERRUPTED = 130  # Ctrl-C
STOPPED = (129, EXIT_INTERRUPTED, 143)  # SIGHUP (its terminal was closed), Ctrl-C, SIGTERM


class UserError(ArgumentTypeError):
    """Raised for bad input.  The message is one line: what, where, what to do next.  Commands print it and exit with
    EXIT_USAGE; where the type of a flag raises it, argparse puts the flag's name before it."""


#: Statuses of an implementation that cannot run here, which is no failure of the run.
NOT_RUNNABLE = ("missing", "unsupported")


class NotRunnable(Exception):
    """Raised where an implementation cannot run.  The message is the reason shown in its row.

    status: "missing" (no package) or "unsupported" (not for this device, dtype or shape)."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        if status not in NOT_RUNNABLE:
            raise ValueError(f"not a status of NotRunnable: {status}")
        self.status = status


class OutOfMemory(Exception):
    """Raised where memory did not suffice for a measurement; the message says where."""


class WrongResult(Exception):
    """Raised where the loss or a gradient is not the oracle's; the message says by how much."""

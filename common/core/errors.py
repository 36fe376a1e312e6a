"""Define the errors that a user can cause and the exit codes, and end every command: one line for a
user's mistake."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from rnnt_bench.core.text import plain, short

EXIT_OK = 0
EXIT_FAILED = 1  # a row that could run did not
EXIT_USAGE = 2  # bad flags or bad input: nothing was measured
EXIT_UNDECIDED = 3  # compare --strict: a time may have grown, though not surely
EXIT_SIGNAL = 128  # plus the number of the signal that ended it, as shells report it
EXIT_INTERRUPTED = 130  # Ctrl-C


class UserError(ArgumentTypeError):
    """Raised for bad input.  The message is one line: what, where, what to do next."""


#: Statuses that are no failure of the run: no package; not for this device, dtype or shape.
NOT_RUNNABLE = ("missing", "unsupported")


class NotRunnable(Exception):
    """Raised where an implementation cannot run.  The message is the reason shown in its row;
    status: one above."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


class OutOfMemory(Exception):
    """Raised where memory did not suffice for a measurement; the message says where."""


class WrongResult(Exception):
    """Raised where the loss or a gradient is not the oracle's; the message says by how much."""


def say(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def go_on_with(python: str) -> NoReturn:
    """Replace this process by the same command under another Python."""
    os.execv(python, [python, *sys.argv])


class Stdout:
    """Write text to a stream, and remember the error with which it failed, so that no other is
    taken for it."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        return int(self._tried(self.stream.write, text))

    def flush(self) -> None:
        self._tried(self.stream.flush)

    def _tried(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def safe_streams() -> None:
    """Let stdout remember its failure, and escape characters that it does not know.  May be called
    again."""
    if not isinstance(sys.stdout, Stdout):
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = Stdout(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115


def guarded(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run the body of the command `program` and return its exit code.

    A mistake of the user, a full stdout and a lack of memory are one line on stderr and EXIT_USAGE;
    a closed pipe behind stdout is EXIT_FAILED; Ctrl-C, SIGTERM and SIGHUP print `interrupted`."""
    safe_streams()
    line = ""
    code = EXIT_USAGE
    with _interruptions() as signals:
        try:
            code = body()
            sys.stdout.flush()
        except KeyboardInterrupt:
            line = interrupted
            code = EXIT_INTERRUPTED
        except UserError as error:
            line = f"error: {short(plain(str(error)), 4000)}"  # it may quote any file
        except MemoryError:
            line = "error: not enough memory here; free some, or ask for less at once"
        except OSError as error:
            if error is getattr(sys.stdout, "failure", None):
                drop_stdout()
                closed = isinstance(error, BrokenPipeError)
                line = (
                    "" if closed else f"error: cannot write the output: {error.strerror or error}"
                )
                code = EXIT_FAILED if closed else EXIT_USAGE
            elif isinstance(error, PermissionError) and error.filename is not None:
                line = plain(
                    f"error: {error.filename}: {error.strerror}; change its mode, or run as its owner"
                )
            else:
                raise
    if line:
        say(f"{program}: {line}")
    return finished(EXIT_SIGNAL + signals[0] if code == EXIT_INTERRUPTED and signals else code)


def finished(code: int = EXIT_OK) -> int:
    """Flush stdout and return `code`; drop what cannot be written, since Python would complain
    about it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
    return code


def drop_stdout() -> None:
    """Send stdout, which failed, to the null device: what is still buffered would fail again when
    Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Let the first of Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt; yield its number in a
    list.

    An ignored signal stays ignored.  Later signals must not stop the writing of the results:
    `timeout` sends two."""
    raised: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        if not raised:
            raised.append(number)
            raise KeyboardInterrupt

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            handlers[number] = signal.signal(number, interrupt)
    try:
        yield raised
    finally:
        # a repetition must not meet the last moments of this process either
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if raised else handler)

"""Define the exit codes and the errors that a user can cause, and run commands so that such an
error is one line on stderr."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rnnt_bench.core.text import plain, short

#: Characters of an error's line, which may quote a file of any size.
LONGEST_ERROR = 4000

EXIT_OK = 0
EXIT_FAILED = 1  # a loss that can run here has failed
EXIT_USAGE = 2  # bad flags or bad input: nothing was measured
EXIT_UNDECIDED = 3  # compare --strict: a time may have grown, though not surely
EXIT_SIGNAL = 128  # add the number of the signal that ended the process, as shells do
EXIT_INTERRUPTED = 130  # Ctrl-C


class UserError(ArgumentTypeError):
    """Raised for bad input.  The message is one line: what, where, what to do next."""


#: Statuses of a loss that cannot run here: its package is missing, or it does not support the
#: device, dtype or shape.  They are no failure of the run.
NOT_RUNNABLE = ("missing", "unsupported")


class NotRunnable(Exception):
    """Raised where an implementation cannot run.

    The message is the reason that its row shows; status: one of NOT_RUNNABLE."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


class OutOfMemory(Exception):
    """Raised when a measurement runs out of memory; the message says where."""


class WrongResult(Exception):
    """Raised where a loss or a gradient differs from the float64 reference; the message says by how
    much."""


def say(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


class Stdout:
    """Stand in for sys.stdout, and keep the OSError with which a write or flush failed.

    So `guarded` can tell an error of stdout from one of any other file."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._keeping_failure():
            return self.stream.write(text)

    def flush(self) -> None:
        with self._keeping_failure():
            self.stream.flush()

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        """If the block raises an OSError, keep it in `failure`, and raise it again."""
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def safe_streams() -> None:
    """Make sys.stdout escape characters that its encoding lacks, and wrap it in a Stdout.

    If there is no sys.stdout, the Stdout writes to os.devnull.  A second call does nothing."""
    if not isinstance(sys.stdout, Stdout):
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = Stdout(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115


def guarded(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run the body of a command, and return the exit code of its process.

    A mistake of the user, a full disk behind stdout, a lack of memory and a lack of permission for
    a file print one line on stderr and give EXIT_USAGE.  A closed pipe behind stdout prints nothing
    and gives EXIT_FAILED.  Ctrl-C, SIGTERM and SIGHUP print `interrupted` and give 128 plus their
    number.

    program: the name of the command, which begins the line; body: returns an exit code."""
    safe_streams()
    line = ""
    code = EXIT_USAGE  # that of every error below that sets no other
    with _interruptions() as signals:
        try:
            code = body()
            sys.stdout.flush()
        except KeyboardInterrupt:
            line = interrupted
            code = EXIT_INTERRUPTED
        except UserError as error:
            line = f"error: {short(plain(str(error)), LONGEST_ERROR)}"
        except MemoryError:
            line = "error: not enough memory here; free some, or ask for less at once"
        except OSError as error:
            if error is getattr(sys.stdout, "failure", None):
                drop_stdout()
                if isinstance(error, BrokenPipeError):
                    code = EXIT_FAILED
                else:
                    line = f"error: cannot write the output: {error.strerror or error}"
            elif isinstance(error, PermissionError) and error.filename is not None:
                line = plain(
                    f"error: {error.filename}: {error.strerror}; change its mode, or run as its owner"
                )
            else:
                raise
    if line:
        say(f"{program}: {line}")
    if code == EXIT_INTERRUPTED and signals:  # `body` too may have caught it, and returned the code
        code = EXIT_SIGNAL + signals[0]
    return flushed(code)


def flushed(code: int = EXIT_OK) -> int:
    """Flush stdout, and return `code`.

    Text that cannot be written is dropped, since Python would try again when it ends, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
    return code


def drop_stdout() -> None:
    """Send stdout to the null device, after a write to it has failed.

    The text in its buffer is written there when Python ends, so it does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Let the first of SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt.

    Yields a list, which gets the number of that signal.  Later signals do nothing, so that results
    are still written: `timeout` sends two.  A signal that was ignored before stays ignored."""
    raised: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        """Note the first signal and raise KeyboardInterrupt; ignore the later ones.

        The second argument is the frame that the signal interrupts; it is not used."""
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
        # After a first signal, others stay ignored until this process ends.
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if raised else handler)

"""How every command ends: its exit code, and one line for a mistake instead of a traceback.

Leaves out programming errors: those keep their traceback.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List

from common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, UserError
from common.results.exports import plain

#: Seconds within which a second signal is the first one's repetition: `timeout` sends two, and a comparison hands its
#: own on to a benchmark that had it from the terminal.  It must not stop what brings the results to disk.
SAME_REQUEST = 1.0


def guarded(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run the body of the command `program`; returns its exit code.

    A user's mistake becomes one line on stderr and EXIT_USAGE, Ctrl-C the line `interrupted` and EXIT_INTERRUPTED, a
    closed pipe EXIT_FAILED.  SIGTERM is a KeyboardInterrupt too, so that it ends as Ctrl-C does, with EXIT_TERMINATED.
    """
    with _interruptions() as signals:
        code = _ended(program, body, interrupted)
        terminated = code == EXIT_INTERRUPTED and signals[-1:] == [signal.SIGTERM]
    return EXIT_TERMINATED if terminated else code


def _ended(program: str, body: Callable[[], int], interrupted: str) -> int:
    try:
        return body()
    except UserError as error:
        print(f"{program}: error: {plain(error)}", file=sys.stderr)  # it may quote a file that anyone wrote
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # Python would complain there when it cannot flush stdout
        return EXIT_FAILED


@contextmanager
def _interruptions() -> Iterator[List[int]]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt; yields the signals that did.  One that is ignored stays so."""
    raised: List[int] = []
    since = -SAME_REQUEST

    def interrupt(number: int, _: Any) -> None:
        nonlocal since
        if time.monotonic() - since >= SAME_REQUEST:
            since = time.monotonic()
            raised.append(number)
            raise KeyboardInterrupt

    wanted = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield raised
    finally:
        for number, handler in before.items():  # a repetition must not meet the last moments of this process either
            signal.signal(number, signal.SIG_IGN if raised else handler)

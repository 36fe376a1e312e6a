"""End every command: with its exit code, and one line for a mistake instead of a traceback.

Leaves out programming errors: those keep their traceback.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, TextIO

from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SIGNAL, EXIT_USAGE, UserError
from common.core.paths import INSTALLED, ROOT
from common.core.text import plain, without_middle

#: Seconds within which a second signal repeats the first: `timeout` sends two, and compare.py hands its own on to a
#: benchmark that got it from the terminal already.  A repetition must not stop the writing of the results.
SAME_REQUEST = 1.0
LONGEST_MISTAKE = 4000  # characters
#: Variable of the environment: what the user called a command, where that is not the name of its script.
CALLED = "RNNT_BENCH_CALLED"
#: "rnnt-bench run"; "" for a script.  Not handed on to the processes that a command starts.
program_called = os.environ.pop(CALLED, "")
#: What help and errors call a script then: {"compare.py": "rnnt-bench compare"}.
names_of_scripts: Dict[str, str] = {}


def say(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def require(package: str) -> None:
    """Restart the command in the main environment where the running Python lacks `package`.

    Where that is impossible, end it with one line on stderr and EXIT_USAGE.
    """
    if importlib.util.find_spec(package) is None:
        safe_streams()
        _go_on_in_main()
        advice = f"pip install {package}"
        if not INSTALLED:
            advice += ", or run `make setup` and use .venv/main/bin/python"
        name = program_called or Path(sys.argv[0]).name
        print(f"{name}: error: {package} is not installed in {sys.executable}: {advice}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _go_on_in_main() -> None:
    """Run this script of the suite in the main environment's Python; return where it is none, has to run in this very
    Python, or there is no such environment."""
    if Path(sys.argv[0]).resolve().parent != ROOT or "--in-place" in sys.argv:
        return
    ask = [sys.executable, "-m", "common.setup.environments", "path", "main"]
    python = subprocess.run(ask, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    if python and Path(python).parents[1].resolve() != Path(sys.prefix).resolve():
        go_on_with(python)


def go_on_with(python: str) -> NoReturn:
    """Replace this process by the same command under another Python."""
    os.environ.update({CALLED: program_called} if program_called else {})
    os.execv(python, [python, *sys.argv])


def as_called(text: str) -> str:
    """Return a text of help or of an error with the scripts in it named as the user calls them."""
    for script, name in names_of_scripts.items():
        text = re.sub(rf"(?<![\w/])(\./)?{re.escape(script)}(?!\w)", name, text)
    return text


class Lossy:
    """A stream of text that drops what it cannot write: a full disk or a closed pipe behind stderr ends no run."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def safe_streams() -> None:
    """Make stdin, stdout and stderr ones that every line of the suite can use.  One that is closed becomes the null
    device: Python has None there, and the next file opened would get its number.  stderr drops what it cannot write,
    and stdout escapes characters that it does not know.  May be called again."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stderr, Lossy):
        sys.stderr = Lossy(sys.stderr)


class End(NamedTuple):
    """One way for a command to end: for which errors, the line about it ("" for none), and the exit code."""

    applies: Callable[[Exception], bool]
    line: Callable[[Any], str]
    code: int


def _of_a_file(error: Exception) -> bool:
    return isinstance(error, OSError) and error.filename is not None


def _of_stdout(error: Exception) -> bool:
    return isinstance(error, OSError) and error.filename is None


#: The first that applies; any other error keeps its traceback.
ENDS = (
    End(
        lambda error: isinstance(error, UserError),
        lambda error: without_middle(as_called(str(error)), LONGEST_MISTAKE),  # it may quote any file
        EXIT_USAGE,
    ),
    End(
        lambda error: isinstance(error, PermissionError) and _of_a_file(error),
        lambda error: plain(f"{error.filename}: {error.strerror}; change its mode, or run as its owner"),
        EXIT_USAGE,
    ),
    End(lambda error: isinstance(error, BrokenPipeError) and _of_stdout(error), lambda _: "", EXIT_FAILED),
    End(_of_stdout, lambda error: f"cannot write the output: {error.strerror or error}", EXIT_USAGE),
    End(
        lambda error: isinstance(error, MemoryError),
        lambda _: "not enough memory here; free some, or ask for less at once",
        EXIT_USAGE,
    ),
)


def guarded(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run the body of the command `program` and return its exit code.

    An error ends it as ENDS says, with one line on stderr.  Ctrl-C prints `interrupted` and returns EXIT_INTERRUPTED;
    SIGTERM and SIGHUP likewise, and return EXIT_SIGNAL and their number.
    """
    safe_streams()
    with _interruptions() as signals:
        code = _ended(program_called or program, body, interrupted)
    return EXIT_SIGNAL + signals[-1] if code == EXIT_INTERRUPTED and signals else code


def _ended(program: str, body: Callable[[], int], interrupted: str) -> int:
    try:
        code = body()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        line, code = interrupted, EXIT_INTERRUPTED
    except Exception as error:
        end = next((end for end in ENDS if end.applies(error)), None)
        if end is None:
            raise
        if _of_stdout(error):
            drop_stdout()
        line, code = end.line(error), end.code
        line = line and f"error: {line}"
    # Here what the body held is free again, also after a MemoryError.
    if line:
        print(f"{program}: {line}", file=sys.stderr)
    return finished(code)


def finished(code: int) -> int:
    """Flush stdout and return `code`; drop what cannot be written, since Python would complain about it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
    return code


def drop_stdout() -> None:
    """Send stdout, which failed, to the null device: what is still buffered would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interruptions() -> Iterator[List[int]]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt; yields those that did.  One that is ignored stays so."""
    raised: List[int] = []
    since = -SAME_REQUEST

    def interrupt(number: int, _: Any) -> None:
        nonlocal since
        if time.monotonic() - since >= SAME_REQUEST:
            since = time.monotonic()
            raised.append(number)
            raise KeyboardInterrupt

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    wanted = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield raised
    finally:
        for number, handler in before.items():  # a repetition must not meet the last moments of this process either
            signal.signal(number, signal.SIG_IGN if raised else handler)

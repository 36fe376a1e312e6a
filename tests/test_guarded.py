"""How commands end: exit codes, and one line instead of a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from commands import ROOT

from common.core.errors import UserError
from common.core.guard import guarded


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("bad\n\x1b[2Jname; give another"), 2, "error: bad name; give another"),
        (MemoryError(), 2, "error: not enough memory here; free some, or ask for less at once"),
        (PermissionError(13, "Permission denied", "x.pt"), 2, "error: x.pt: Permission denied; change its mode"),
        (KeyboardInterrupt(), 130, "nothing was written"),
    ],
)
def test_an_end_is_one_harmless_line(error, code, line, capsys):
    assert guarded("tool.py", raising(error), interrupted="nothing was written") == code
    err = capsys.readouterr().err
    assert err.startswith(f"tool.py: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        FileNotFoundError(2, "No such file", "/nowhere"),
        BlockingIOError(11, "Resource temporarily unavailable"),  # of os.fork under a limit of processes
        ConnectionRefusedError(111, "Connection refused"),
        BrokenPipeError(32, "Broken pipe"),  # of a pipe to a process
        OSError("a template was not found"),
    ],
    ids=repr,
)
def test_another_error_keeps_its_traceback(error, capsys):
    with pytest.raises(type(error)):
        guarded("tool.py", raising(error))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_once(number, code, capsys):
    """The second, which `timeout` sends at once, does not meet what the first one ends."""
    ended = []

    def body():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            ended.append(True)

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {each: signal.signal(each, signal.default_int_handler) for each in numbers}
    try:
        assert guarded("tool.py", body) == code and ended == [True]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert capsys.readouterr().err == "tool.py: interrupted\n"


def test_a_signal_that_is_ignored_stays_so():
    """nohup means that the terminal may be closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert guarded("tool.py", lambda: os.kill(os.getpid(), signal.SIGHUP) or 1) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


CODE = """
import sys; from common.core.guard import guarded; assert 'torch' not in sys.modules
sys.exit(guarded('tool.py', lambda: [print('x' * 99) for _ in range({lines})] and 0))
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("lines", [1, 10**4], ids=["at the end", "on the way"])
def test_a_full_disk_behind_stdout_is_one_line(lines):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(lines=lines)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("tool.py: error: cannot write the output") and "No space left" in done.stderr


def test_a_closed_pipe_is_silent():
    line = [sys.executable, "-c", CODE.format(lines=10**4)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"x" * 99 + b"\n"
        writer.stdout.close()
        assert (writer.stderr.read(), writer.wait(60)) == (b"", 1)

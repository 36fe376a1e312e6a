"""How commands end: exit codes, and one line instead of a traceback."""

from __future__ import annotations

import os
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


def test_a_mistake_is_one_harmless_line(capsys):
    assert guarded("tool.py", raising(UserError("bad\n\x1b[2Jname; give another"))) == 2
    assert capsys.readouterr().err == "tool.py: error: bad name; give another\n"


def test_ctrl_c_says_what_is_left(capsys):
    assert guarded("tool.py", raising(KeyboardInterrupt())) == 130
    assert guarded("tool.py", raising(KeyboardInterrupt()), interrupted="nothing was written") == 130
    assert capsys.readouterr().err == "tool.py: interrupted\ntool.py: nothing was written\n"


def test_the_rest_is_the_command_s_own(capsys):
    assert guarded("tool.py", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        guarded("tool.py", raising(ZeroDivisionError()))
    assert capsys.readouterr().err == ""


def test_an_error_about_a_file_is_not_one_of_stdout(capsys):
    with pytest.raises(FileNotFoundError):
        guarded("tool.py", lambda: len(open("/nowhere").read()))
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("lines", [1, 10**4], ids=["at the end", "on the way"])
def test_a_full_disk_behind_stdout_is_one_line(lines):
    code = (
        "import sys; from common.core.guard import guarded; "
        f"sys.exit(guarded('tool.py', lambda: [print('x' * 99) for _ in range({lines})] and 0))"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("tool.py: error: ") and "No space left" in done.stderr


def test_a_closed_pipe_is_silent():
    code = (
        "import sys; from common.core.guard import guarded; assert 'torch' not in sys.modules; "
        "sys.exit(guarded('tool.py', lambda: [print('x' * 99) for _ in range(10**4)] and 0))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.readline() == b"x" * 99 + b"\n"
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait(60)) == (b"", 1)
    writer.stderr.close()

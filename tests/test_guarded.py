"""How commands end: exit codes, and one line instead of a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import ROOT

from common.commands import guarded
from common.errors import UserError


def raising(error):
    def body():
        raise error

    return body


def test_a_mistake_is_one_harmless_line(capsys):
    assert guarded("tool.py", raising(UserError("bad\n\x1b[2Jname; give another"))) == 2
    assert capsys.readouterr().err == "tool.py: error: bad [2Jname; give another\n"


def test_ctrl_c_says_what_is_left(capsys):
    assert guarded("tool.py", raising(KeyboardInterrupt())) == 130
    assert guarded("tool.py", raising(KeyboardInterrupt()), interrupted="nothing was written") == 130
    assert capsys.readouterr().err == "tool.py: interrupted\ntool.py: nothing was written\n"


def test_the_rest_is_the_command_s_own(capsys):
    assert guarded("tool.py", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        guarded("tool.py", raising(ZeroDivisionError()))
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_silent():
    code = (
        "import sys; from common.commands import guarded; assert 'torch' not in sys.modules; "
        "sys.exit(guarded('tool.py', lambda: [print('x' * 99) for _ in range(10**4)] and 0))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.readline() == b"x" * 99 + b"\n"
    writer.stdout.close()
    assert (writer.stderr.read(), writer.wait(60)) == (b"", 1)
    writer.stderr.close()

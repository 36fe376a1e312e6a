"""How commands start and end: exit codes, one line instead of a traceback, and what they say where Python, its packages
or the environments of the suite are not as wanted."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from commands import ROOT, start

from common import command
from common.core.errors import UserError
from common.core.guard import guarded
from common.setup import environments


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


#: One script that measures, and one that reads.
SCRIPTS = ("benchmark_all.py", "summarize.py")


@pytest.fixture
def bare(tmp_path):
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


def outcome(*line, **variables):
    return subprocess.run(list(map(str, line)), env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_is_one_line(script, tmp_path):
    (tmp_path / "msgspec.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = start(script, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, f"{script}: interrupted\n")


def test_an_old_python_is_one_line():
    """Played by a new one: no older one is at hand."""
    done = outcome(
        sys.executable, "-c", "import sys; sys.version_info = (3, 8); sys.argv = ['summarize.py']; import common"
    )
    assert done.returncode == 2 and "3.9 or newer" in done.stderr and len(done.stderr.splitlines()) == 1
    for path in [*ROOT.glob("*.py"), ROOT / "common" / "__init__.py"]:  # what it reads before it says so
        ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.skipif(environments.interpreter("main") is None, reason="the main environment is not there")
def test_commands_of_the_readme_start_under_a_bare_python(bare, tmp_path):
    """They need no torch for --help: one that refuses to be imported stands in the way."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported for --help')")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\./rnnt-bench ([a-z]+)", text))
    assert named <= set(command.COMMANDS)
    for words in [[script] for script in SCRIPTS] + [["rnnt-bench", name] for name in ("report", "compare", "check")]:
        line = [bare, ROOT / words[0], *words[1:], "--help"]
        done = outcome(*line, PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and "usage:" in done.stdout, (words, done.stderr)


def test_without_any_environment_a_command_says_what_to_do(bare, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
        done = outcome(bare, tmp_path / script, "--device", "cpu")
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and "make setup" in line and script in line


def test_a_python_that_prints_as_it_starts_lists_the_losses(bare, tmp_path):
    """Some sites greet in their sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    done = outcome(
        bare, ROOT / "rnnt-bench", "list", "--only", "reference", "--device", "cpu", PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 0 and "reference" in done.stdout, done.stderr


def test_targets_of_make_are_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert {"bench", "test"} <= targets
    assert outcome("make", "-n", "-C", ROOT, *sorted(targets), "NAME=k2").returncode == 0

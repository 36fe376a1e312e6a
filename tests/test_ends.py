"""How a run ends, however it is ended: nothing that it started is left, and one line says what was."""

from __future__ import annotations

import ast
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import (
    ROOT,
    command,
    ignoring,
    own_loss,
    pass_on_no_ignored_signals,
    piped,
    rows_of,
    run,
    start,
    wait_for,
    wait_for_worker,
)
from faults.running import Mark

from common.setup import environments

pytest.importorskip("torch")

LONG = ["--in-place", "--preset", "quick", "--passes", "timing", "--max-seconds", "30", "--spread", "0.0001%"]
SHORT = ["--in-place", "--preset", "quick", "--passes", "correctness", "--limits", "false"]
#: A process that leaves its parent, its session and its output.
DAEMON = "import subprocess; subprocess.Popen(['setsid', 'sh', '-c', 'sleep 300 & wait'])"


@pytest.fixture
def marked():
    return Mark()


@pytest.fixture
def flags(tmp_path, tiny_shapes):
    return ["--shape-file", tiny_shapes, "--log-dir", tmp_path / "log"]


@pytest.mark.parametrize("stopped", [False, True], ids=["at its first instructions", "and it is stopped"])
def test_a_worker_dies_with_its_parent(stopped, flags, marked):
    for _ in range(2):
        process = start("losses/benchmark_reference.py", *flags, *LONG, env={**os.environ, **marked.variable})
        worker = wait_for_worker(process, "correctness")
        if stopped:
            os.kill(worker, signal.SIGSTOP)
        process.kill()
        process.communicate(timeout=60)
        wait_for(lambda: not marked.left(), "end of the worker", seconds=2)


def test_a_worker_whose_parent_is_gone_does_not_start(tmp_path):
    """The parent ends between the fork and the request to be killed with it."""
    code = (
        "import os, sys, time; from common.system.processes import die_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "die_with_parent(parent); open(sys.argv[1], 'w')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "alive")], cwd=ROOT, check=True)
    time.sleep(0.5)
    assert not (tmp_path / "alive").exists()


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid")
def test_a_daemon_of_a_loss_is_ended_with_its_worker(flags, marked, tmp_path):
    script = own_loss(tmp_path, in_loss=f"import torch\n    {DAEMON}")
    done = run("benchmark_all.py", "--only", script, *flags, *SHORT, env={**os.environ, **marked.variable})
    assert rows_of(tmp_path / "log")["own0"]["status"] == "ok", done.stderr
    assert not marked.left()


def test_a_job_that_is_killed_leaves_no_scratch(flags, tmp_path):
    """While the trace of its memory pass is read, which is in a folder of its own."""
    ends = "import os; from common.traces import reader; reader.memory_rise = lambda path: os.kill(os.getpid(), 9)"
    script, scratch = own_loss(tmp_path, at_import=ends), tmp_path / "scratch"
    scratch.mkdir()
    passes = ["--in-place", "--preset", "quick", "--passes", "correctness,memory"]
    run("benchmark_all.py", "--only", script, *flags, *passes, env={**os.environ, "TMPDIR": str(scratch)})
    row = rows_of(tmp_path / "log")["own0"]
    assert row["status"] == "error" and "SIGKILL" in row["reason"], row
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own


def test_a_closed_terminal_ends_a_run_as_sigterm_does(flags, marked, tmp_path):
    process = start("losses/benchmark_reference.py", *flags, *LONG, env={**os.environ, **marked.variable})
    wait_for_worker(process, "correctness")
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 129 and "interrupted" in errors and "Traceback" not in errors
    assert not marked.left() and rows_of(tmp_path / "log")["reference"]["status"] == "interrupted"


def test_signals_that_are_ignored_stay_so_and_sigterm_ends(flags, marked, tmp_path):
    """nohup means that the terminal may be closed, and Ctrl-C is not meant for a job that a script runs beside."""
    line = ignoring(command("losses/benchmark_reference.py", *flags, *LONG))
    process = piped(line, cwd=ROOT, env={**os.environ, **marked.variable})
    wait_for_worker(process, "correctness")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    wait_for_worker(process, "timing-1")
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "interrupted" in errors and "Traceback" not in errors
    assert not marked.left() and rows_of(tmp_path / "log")["reference"]["status"] == "interrupted"


def test_what_tests_start_ignores_no_signal():
    shown = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGINT).__name__)"
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        pass_on_no_ignored_signals()
        done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert done.stdout.split() == ["SIG_DFL", "default_int_handler"]


@pytest.mark.parametrize("script", ["summarize.py", "benchmark_all.py", "conformance.py"])
def test_ctrl_c_while_a_command_is_imported_is_one_line(script, tmp_path):
    (tmp_path / "msgspec.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = start(script, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, f"{script}: interrupted\n")


def test_an_old_python_is_one_line():
    """Played by a new one: no older one is at hand."""
    code = "import sys; sys.version_info = (3, 8, 0, 'final', 0); sys.argv = ['summarize.py']; import common"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "3.9 or newer" in done.stderr and len(done.stderr.splitlines()) == 1
    for path in [*ROOT.glob("*.py"), ROOT / "common" / "__init__.py"]:  # what it reads before it says so
        ast.parse(path.read_bytes(), feature_version=(3, 8))


def test_ctrl_z_stops_the_worker_too_and_fg_lets_it_go_on(flags, tmp_path):
    """Runs in a process group of its own, as a shell starts it: the kernel stops none that nobody could continue."""

    def states():
        stats = (Path(f"/proc/{number}/stat").read_text() for number in (process.pid, worker))
        return [stat.rpartition(")")[2].split()[0] for stat in stats]

    line = command("losses/benchmark_reference.py", *flags, *LONG)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, cwd=ROOT, preexec_fn=lambda: os.setpgid(0, 0), **pipes)
    try:
        worker = wait_for_worker(process, "timing-1")
        for _ in range(2):
            process.send_signal(signal.SIGTSTP)
            wait_for(lambda: states() == ["T", "T"], "stop of both")
            process.send_signal(signal.SIGCONT)
            wait_for(lambda: "T" not in states(), "end of the stop")
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and "Traceback" not in errors
    assert rows_of(tmp_path / "log")["reference"]["status"] == "interrupted"


def scripts_of_each_kind():
    """Return the names of scripts: of those that import the same modules and end alike, the first."""
    kinds = {}
    for path in sorted(ROOT.glob("*.py")):
        body = ast.parse(path.read_bytes()).body
        modules = {name.name for line in body if isinstance(line, ast.Import) for name in line.names}
        modules |= {line.module for line in body if isinstance(line, ast.ImportFrom)}
        kinds.setdefault((frozenset(modules), ast.unparse(body[-1])), path.name)
    return sorted(set(kinds.values()) - {"setup.py"})


SCRIPTS = scripts_of_each_kind()


def help_of(commands, *python, cwd, **variables):
    """Ask each command, a script and its arguments, for --help, four at a time; returns how they ended."""

    def ask(words):
        line = [*map(str, python), str(ROOT / words[0]), *words[1:], "--help"]
        return subprocess.run(line, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)

    with ThreadPoolExecutor(4) as pool:
        return list(zip(commands, pool.map(ask, commands)))


@pytest.fixture
def bare(tmp_path):
    """A Python without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


def test_every_script_starts_under_a_bare_python(bare, tmp_path):
    """One of each kind, with the arguments that README gives it, runs where Python leaves out the folder of a script,
    and needs no torch for --help: one that refuses to be imported stands in the way."""
    if environments.interpreter("main") is None:
        pytest.skip("the main environment is not there, or out of date")
    shutil.copy(ROOT / "benchmark_mine.py", tmp_path / "benchmark_flash.py")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    of_readme = [shlex.split(line) for line in re.findall(r"`\./(\w+\.py[^`\n]*)`", text)]
    commands = {words[0]: words for words in of_readme if (ROOT / words[0]).is_file()}
    assert commands["conformance.py"] == ["conformance.py"]
    commands = [*({script: [script] for script in SCRIPTS} | commands).values()]
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text("raise RuntimeError('imported for --help')")
    variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "modules")}
    for words, done in help_of(commands, bare, cwd=tmp_path, **variables):
        assert done.returncode == 0 and words[0] in done.stdout and "usage:" in done.stdout, (words, done.stderr)
    listed = subprocess.run([bare, ROOT / "conformance.py", "--list"], cwd=tmp_path, capture_output=True, text=True)
    assert listed.returncode == 0 and "ragged" in listed.stdout, listed.stderr


def test_the_commands_of_the_readme_say_what_they_would_do(bare, tmp_path):
    """Measuring commands with --dry-run, under a bare Python; targets of make and commands of rnnt-bench are there."""
    if environments.interpreter("main") is None:
        pytest.skip("the main environment is not there, or out of date")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measuring = [shlex.split(line) for line in re.findall(r"`\./(benchmark_all\.py [^`\n]*)`", text)]
    dry = [[bare, ROOT / words[0], *words[1:], "--dry-run", "--log-dir", tmp_path / "log"] for words in measuring]
    others = {line.split()[0] for line in re.findall(r"(?:`\./|^\./)rnnt-bench ([^`\n]*)", text, flags=re.MULTILINE)}
    lines = dry + [[bare, ROOT / "rnnt-bench", word, "--help"] for word in sorted(others)]
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert {"bench", "test"} <= targets and len(dry) >= 5
    lines.append(["make", "-n", "-C", ROOT, *sorted(targets), "NAME=k2"])
    with ThreadPoolExecutor(4) as pool:
        ended = pool.map(lambda line: subprocess.run(line, cwd=tmp_path, capture_output=True, text=True), lines)
    for line, done in zip(lines, ended):
        assert done.returncode == 0 or (line in dry and done.returncode == 2), (line, done.stderr)
        assert "Traceback" not in done.stderr and ("would" in done.stdout or line not in dry or done.returncode)
    assert not (tmp_path / "log").exists()


def test_a_script_starts_in_an_isolated_python(tmp_path):
    ((_, done),) = help_of([["summarize.py"]], sys.executable, "-I", cwd=tmp_path)
    assert done.returncode == 0 and "summarize.py" in done.stdout, done.stderr


def test_without_any_environment_every_script_says_what_to_do(bare, tmp_path):
    """One line of each kind of script, before anything is measured; likewise where Python leaves out its folder."""
    safe_path = {**os.environ, "PYTHONSAFEPATH": "1"}
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    shutil.copytree(ROOT / "common", checkout / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for script in SCRIPTS:
        shutil.copy(ROOT / script, checkout)
        line = [bare, checkout / script, "--help"]
        done = subprocess.run(line, cwd=tmp_path, env=safe_path, capture_output=True, text=True)
        if done.returncode:
            (line,) = done.stderr.splitlines()
            assert done.returncode == 2 and "make setup" in line and script in line


def test_a_script_that_spoils_its_process_costs_its_own_row_alone(flags, tmp_path):
    """It ends at import, it changes the current folder, it has no such module."""
    bodies = ["import os; os._exit(0)", "import os; os.chdir('/')", "import nowhere_at_all"]
    scripts = [own_loss(tmp_path, at_import=body) for body in bodies]
    names = ",".join(map(str, [*scripts, "reference"]))
    done = run("benchmark_all.py", "--only", names, *flags, *SHORT, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    rows = rows_of(tmp_path / "log")
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {"own0": "error", "own1": "ok", "own2": "missing", "reference": "ok"}
    assert "exit code 0" in rows["own0"]["reason"] and "nowhere_at_all" in rows["own2"]["reason"]


def test_a_list_has_a_script_that_ends_its_process(tmp_path):
    script = own_loss(tmp_path, at_import="import os; os._exit(0)")
    done = run("benchmark_all.py", "--list", "--only", script, "--device", "cpu")
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("own0 ")]
    assert done.returncode == 0 and "missing" not in row and "unsupported" not in row


def test_a_loss_that_returns_nothing_is_named_in_the_error(flags, tmp_path):
    script = own_loss(tmp_path, in_loss="return None")
    run("benchmark_all.py", "--only", script, *flags, *SHORT)
    row = rows_of(tmp_path / "log")["own0"]
    assert row["status"] == "error" and "the loss is None" in row["reason"]


def test_too_little_address_space_for_torch_is_said(flags, tmp_path):
    limit = 1_500_000 * 1024
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))}
    run("losses/benchmark_reference.py", *flags, *SHORT, **limits)
    row = rows_of(tmp_path / "log")["reference"]
    assert row["status"] == "oom" and "ulimit -v 1500000" in row["reason"], row


def test_a_full_scratch_folder_is_said(flags, disk, tmp_path):
    small = disk(4)
    run("losses/benchmark_reference.py", *flags, *SHORT, env={**os.environ, "TMPDIR": str(small)})
    row = rows_of(tmp_path / "log")["reference"]
    assert row["status"] == "error" and str(small) in row["reason"] and "TMPDIR" in row["reason"], row

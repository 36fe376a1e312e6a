"""Running the suite's own commands as a user would, for the tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

from rnnt_bench.core import implementations
from rnnt_bench.records import store

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"


def pass_on_no_ignored_signals():
    """Make SIGINT and SIGHUP end what this process starts, though nohup, `&` or CI had them ignored here."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def command(script, *arguments):
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def read(line, cwd=ROOT):
    """Run the script of a command line in this process; return what subprocess.run would."""
    path, before = list(sys.path), Path.cwd()
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    store.warn.cache_clear()  # a process of its own would warn again, and import a script again
    implementations._attributes_of_file.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", line[1:]))
        stack.enter_context(mock.patch.dict(implementations.BY_NAME))  # a script of a user's adds itself
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        os.chdir(cwd)
        try:
            runpy.run_path(line[1], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            os.chdir(before)
            sys.path[:] = path
    texts = [stream.buffer.getvalue().decode() for stream in (output, errors)]
    return subprocess.CompletedProcess(line, code, *texts)


def run(script, *arguments, **options):
    """Run a script to its end in this process, or in another if it is not ours or has an option of subprocess."""
    line = command(script, *arguments)
    if Path(line[1]).parent in (ROOT, ROOT / "losses") and options.keys() <= {"cwd", "timeout"}:
        return read(line, options.get("cwd", ROOT))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(line, **{**pipes, "timeout": 600, "cwd": ROOT, **options})


def start(script, *arguments, cwd=ROOT, env=None):
    """Start a script; what it prints is read by `communicate`."""
    return piped(command(script, *arguments), cwd=cwd, env=env)


def piped(line, **options):
    """Start a process in a session of its own, so that it can be killed with what it started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, **pipes, start_new_session=True, **options)


@contextlib.contextmanager
def within(seconds, hung=None):
    """Raise `hung`, by default an AssertionError, where the block takes more than `seconds`."""

    def hang(*_):
        raise hung or AssertionError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def own_loss(folder, in_loss):
    """Write a script of a user's loss into `folder`, with more lines in the loss."""
    text = (ROOT / "benchmark_mine.py").read_text()
    path = folder / f"benchmark_own{len(list(folder.glob('*.py')))}.py"
    path.write_text(text.replace("    import torch\n", f"    {in_loss}\n", 1))
    return path


def has_words(text, *words):
    """Return whether all of `words` are in one passage of `text`, in this order, whatever stands between them."""
    return re.search(".{0,200}?".join(map(re.escape, words)), text, re.DOTALL) is not None


def assert_user_error(done, *words):
    """One clear line on stderr with all `words`, exit code 2, no traceback."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and len(lines) == 1 and ": error: " in lines[0], done.stderr
    for word in words:
        assert str(word) in lines[0]


def wait_for(happened, what, seconds=120):
    """Wait until `happened()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def parent_of(number):
    return int(Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_for_worker(parent, job, seconds=120):
    """Process id of the worker of `job` ("timing-1") of the command `parent`, forked from a server of its."""
    workers = []

    def started():
        assert parent.poll() is None, f"ended before {job}: {parent.stderr.read()}"
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if parent_of(parent_of(entry.name)) == parent.pid:
                    description = Path(os.readlink(entry / "fd/1")).with_name("job.json")
                    if json.loads(description.read_text())["job"] == job:
                        workers.append(int(entry.name))
        return workers

    wait_for(started, f"worker of {job}", seconds)
    return workers[0]


def rows_of(log_dir, *arguments):
    """The rows of summarize.py, by implementation."""
    done = run("summarize.py", log_dir, "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}

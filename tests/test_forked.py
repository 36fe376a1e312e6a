"""A command that is forked ends as one that is started does: the tests would say nothing about it otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import forked
import pytest
from commands import ROOT, command, wait_for
from faults.running import Mark


@pytest.mark.parametrize(
    "arguments",
    [["conformance.py", "--help"], ["benchmark_all.py", "--only", "nothing"], ["generate_shape_info.py", "--nonsense"]],
)
def test_code_and_streams_are_those_of_a_process(arguments, tmp_path):
    started = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True)
    fork = forked.run(command(*arguments), tmp_path)
    assert (fork.returncode, fork.stdout, fork.stderr) == (started.returncode, started.stdout, started.stderr)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script that is forked."""
    (tmp_path / "common").mkdir()

    def make(name, text):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(forked, "SCRIPTS", {name, *forked.SCRIPTS})
        return command(tmp_path / name)

    return make


def test_a_command_that_takes_too_long_is_ended(script, tmp_path):
    line = script("slow.py", "import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(line, tmp_path, 0.2)


@pytest.mark.parametrize(
    "text, code", [("os.abort()", -signal.SIGABRT), ("sys.exit(3)", 3), ("1 / 0", 1), ("sys.exit()", 0)]
)
def test_its_end_is_told(text, code, script, tmp_path):
    done = forked.run(script("ends.py", f"import os, sys\nprint(1, flush=True)\n{text}"), tmp_path)
    assert (done.returncode, done.stdout) == (code, "1\n")


def test_two_at_once_each_with_the_common_beside_it(script, tmp_path):
    """Processes that the first leaves behind live on."""
    (tmp_path / "common" / "__init__.py").write_text("WORD = 'own'")
    leaves = "import common, subprocess\nprint(common.WORD, subprocess.Popen(['sleep', '300']).pid, flush=True)\n"
    first = forked.start(script("first.py", leaves + "import time; time.sleep(300)"), tmp_path)
    assert forked.run(script("second.py", "import common; print(common.WORD)"), tmp_path).stdout == "own\n"
    wait_for(lambda: "own" in first.stdout.read(), "its word")
    first.kill()
    first.stdout.seek(0)
    output, _ = first.communicate()
    assert first.returncode == -signal.SIGKILL and first.poll() == -signal.SIGKILL
    os.kill(int(output.split()[1]), signal.SIGKILL)  # it is there


def test_a_benchmark_that_a_command_starts_is_a_fork_of_it(script, tmp_path):
    """Its code and its streams are those of a process."""
    ends = "import sys; print('torch' in sys.modules, flush=True); print(*sys.argv[1:], file=sys.stderr); sys.exit(3)"
    script("benchmark_all.py", ends)
    starts = (
        "import subprocess, sys\n"
        "line = [sys.executable, 'benchmark_all.py', '--only', 'k2']\n"
        "done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)\n"
        "print(done.returncode, done.stdout.strip(), done.stderr.strip(), flush=True)\n"
        "subprocess.run(line, stdout=sys.stderr)\n"
    )
    done = forked.run(script("compare.py", starts), tmp_path)
    assert done.stdout == "3 True --only k2\n" and done.stderr == "True\n--only k2\n"


def test_its_processes_are_found_by_their_mark(script, tmp_path):
    mark = Mark()
    line = script("marked.py", "import time; print(1, flush=True); time.sleep(300)")
    process = forked.start(line, tmp_path, {**os.environ, **mark.variable})
    wait_for(process.stdout.read, "its word")
    assert len(mark.left()) == 1 and not Mark().left()
    process.kill()
    process.wait()
    wait_for(lambda: not mark.left(), "its end", seconds=5)


ASKS = """
import json, sys
from pathlib import Path
import forked
forked.FOLDER, forked.SCRIPTS, forked.ENVIRONMENT = Path(sys.argv[1]), {"parents.py"}, json.loads(sys.argv[2])
print(forked.run(sys.argv[3:], Path.cwd(), env=forked.ENVIRONMENT).stdout)
"""


def test_another_process_of_the_suite_uses_the_same_server(script, tmp_path):
    parents = "import os\nfrom pathlib import Path\nprint(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3])"
    line = script("parents.py", f"{parents}\n")
    mine = forked.run(line, tmp_path).stdout
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    asks = [sys.executable, "-c", ASKS, str(forked.FOLDER), json.dumps(forked.ENVIRONMENT), *line]
    other = subprocess.run(asks, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert int(other.stdout) == int(mine), other.stderr


def test_another_environment_is_no_fork(monkeypatch, tmp_path):
    assert forked.run(command("conformance.py", "--help"), tmp_path).returncode == 0
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert forked.run(command("conformance.py", "--help"), tmp_path) is None

"""Models, sizes and configurations that nobody should give, by the real commands: one clear line."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from commands import assert_user_error, run
from fixtures_model_runs import InProcess

from common.core.guard import guarded
from common.tools.flops import command

pytest.importorskip("torch")
pytest.importorskip("yaml")

MODELS = """
import torch

class Ends(torch.nn.Module):
    def forward(self, x):
        raise SystemExit(0)

class Cries(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("x\\x1b[2J" * 10**6)

class EndsEarly(torch.nn.Module):
    def __init__(self):
        raise SystemExit(0)
"""
#: That a process of its own outlives: at import, when it is made, when it is called -> the words of the one line.
GONE = {
    "import os; os._exit(0)": "exit code 0",
    "def Model(): import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
    "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): import os; os._exit(0)": "exit code 0",
    "import threading, time, torch\nclass Model(torch.nn.Linear):\n    def __init__(self): super().__init__(2, 3)\n"
    "    def forward(self, x): threading.Thread(target=time.sleep, args=(600,)).start(); print('x' * 10**8)": "",
}


@pytest.fixture
def counted(tmp_path, capsys):
    """The command flops with its job in this process."""
    (tmp_path / "strange.py").write_text(MODELS)

    def count(name, shape="1x2"):
        log = ["--log-dir", str(tmp_path / "log"), "--quiet"]
        flags = command.parser().parse_args([f"{tmp_path}/strange.py:{name}", "--input-shape", shape, *log])
        code = guarded("rnnt-bench flops", lambda: command.main(flags, InProcess()))
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    return count


@pytest.mark.parametrize("text", GONE)
def test_a_model_that_takes_its_process_with_it(text, tmp_path):
    path = tmp_path / "strange.py"
    path.write_text(text)
    done = run(
        "rnnt-bench", "flops", "strange.py:Model", "--input-shape", "1x2", "--log-dir", "log", cwd=tmp_path, timeout=120
    )
    if GONE[text]:
        assert_user_error(done, "strange.py:Model", GONE[text])
        assert not done.stdout
    else:
        assert done.returncode == 0 and "Model" in done.stdout and "xxx" not in done.stdout


@pytest.mark.parametrize(
    "name, words", [("Ends", "SystemExit"), ("EndsEarly", "cannot be made"), ("Cries", "RuntimeError")]
)
def test_a_model_that_ends_the_process_is_no_success(counted, name, words):
    done = counted(name)
    assert_user_error(done, words)
    assert len(done.stderr) < 5000 and "\x1b" not in done.stderr and not done.stdout


@pytest.mark.parametrize("shape", ["99999999999999999999x2", "9999999999x99999"])
def test_an_input_that_no_memory_holds(counted, shape):
    assert_user_error(counted("Ends", shape), shape, "smaller")


STRANGE = {"bytes": b"\xff\xfe\x00", "nested": b"[" * 10**5, "one that nobody writes": None}
READERS = {
    "rnnt-bench": ["flops", "torch.nn:Linear", "--input-shape", "1x2", "--args"],
    "profile_model.py": ["--config"],
    "pipeline_metrics.py": ["--config"],
}


@pytest.mark.parametrize(
    "script, kind",
    [*(("rnnt-bench", kind) for kind in STRANGE), *((name, [*STRANGE][-1]) for name in [*READERS][1:])],
)
def test_a_configuration_that_is_none(script, kind, tmp_path):
    path, content = tmp_path / "strange.yaml", STRANGE[kind]
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert_user_error(run(script, *READERS[script], path, timeout=60), path)

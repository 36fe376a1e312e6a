"""What the four commands about models have in common: flags, strange models and files, the report of a log."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from rnnt_bench.analysis.logs import read_any
from rnnt_bench.conformance import command as check
from rnnt_bench.show import page
from rnnt_bench.tools.flops import command as flops
from rnnt_bench.tools.inference import command as inference
from rnnt_bench.tools.pipelines import command as pipelines
from rnnt_bench.tools.profile import command as profile

from canned import Canned, measured
from commands import run
from fixtures_model_runs import InProcess, command, write_profile

LINEAR = ("torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=5", "--input-shape", "2x3")


def test_a_busy_machine_is_told_before_anything_is_measured(tmp_path, capsys):
    class Busy(InProcess):
        def disturbance(self, settings, seconds=0.0):
            return "load 24 on 2 cores"

        def execute(self, job, *_):
            return [job.status("missing", "no package")]

    for module in (flops, pipelines, inference, profile):
        words = LINEAR if module is flops else ()  # a count measures no time
        command(module, *words, "--device", "cpu", "--log-dir", tmp_path, executor=Busy())
        errors = capsys.readouterr().err
        assert errors.count("warning: load 24 on 2 cores") == (not words) and "no package" in errors


class Failing(InProcess):
    """Answer each job with an error."""

    def execute(self, job, *_):
        return [job.status("error", "as asked")]


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"machine": {"cpu": "another"}}, "another machine"),
        ({"git_revision": "0" * 40}, "another revision"),
        ({"code": "0" * 12}, "code"),
    ],
    ids=["machine", "revision", "code"],
)
@pytest.mark.parametrize("tool", ["flops", "pipelines", "inference", "profile", "check", "run", "sweep"])
def test_resume_goes_on_with_no_run_of_another_machine_or_revision(tool, changed, words, tmp_path, capsys):
    modules = {"flops": flops, "pipelines": pipelines, "inference": inference, "profile": profile, "check": check}
    flags = {"flops": LINEAR, "check": ("--only", "reference", "--in-place"), "sweep": ("--sweep", "vocab-size=8")}

    def measure(*more):
        if tool in modules:
            command(modules[tool], *flags.get(tool, ()), "--log-dir", tmp_path, *more, executor=Failing())
        else:
            measured(tmp_path, Canned(), *flags.get(tool, ()), *more, names=["reference"])
        return {path: path.read_bytes() for path in tmp_path.glob("*/*.jsonl")}

    ((file, content),) = measure().items()
    assert list(measure("--resume")) == [file] and words not in capsys.readouterr().err
    head, *lines = file.read_text().splitlines()
    head = json.loads(head)
    file.write_text("\n".join([json.dumps({**head, **changed}), *lines]) + "\n")
    before = file.read_bytes()
    after = measure("--resume")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--resume: ")]
    assert words in line and len(after) == 2 and after[file] == before
    assert len(measure("--resume")) == 2  # which goes on with the new one


def test_a_quick_count_needs_no_input_and_no_weights(tmp_path, capsys):
    words = ("torchaudio.models:wav2vec2_base", "--preset", "quick", "--format", "csv", "--log-dir", tmp_path)
    assert command(flops, *words) == 0 and "pseudo,1,1.0,1.0," in capsys.readouterr().out


def test_a_count_is_kept_and_shown(tmp_path):
    assert command(flops, *LINEAR, "--preset", "quick", "--log-dir", tmp_path) == 0
    assert (tmp_path / "flops-torch.nn-Linear" / "tool.jsonl").exists()
    assert not (tmp_path / "details.txt").exists()  # of the benchmark
    text = page.page(read_any([tmp_path]).groups, tmp_path, paths=[tmp_path])
    assert "Operations of a model" in text and "torch.nn-Linear" in text and "30 MACs" in text
    assert "30 MACs" in run("summarize.py", tmp_path).stdout


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
    "import threading, time, torch\nclass Model(torch.nn.Linear):\n    def __init__(self): super().__init__(2, 3)\n"
    "    def forward(self, x): threading.Thread(target=time.sleep, args=(600,)).start(); print('x' * 10**8)": "",
}


@pytest.mark.parametrize("text", GONE)
def test_a_model_that_takes_its_process_with_it(text, tmp_path):
    (tmp_path / "strange.py").write_text(text)
    words = ("strange.py:Model", "--input-shape", "1x2", "--log-dir", "log")
    done = run("rnnt-bench", "flops", *words, cwd=tmp_path, timeout=120)
    assert done.returncode == bool(GONE[text]) and (GONE[text] or "Model") in done.stdout
    assert "Traceback" not in done.stderr and "xxx" not in done.stdout


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("Ends", "1x2", "SystemExit"),
        ("EndsEarly", "1x2", "cannot be made"),
        ("Cries", "1x2", "RuntimeError"),
        ("Ends", "99999999999999999999x2", "smaller"),
    ],
)
def test_a_model_that_ends_the_process_or_has_no_memory_is_no_success(name, shape, words, tmp_path, capsys):
    (tmp_path / "strange.py").write_text(MODELS)
    assert command(flops, f"{tmp_path}/strange.py:{name}", "--input-shape", shape, "--log-dir", tmp_path / "log") == 2
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err) < 5000 and "\x1b" not in printed.err and not printed.out


LONG = [b"a: " + number for number in (b"9" * 5000, b"0x" + b"f" * 5000, b"0b" + b"1" * 20000, b"1" + b":59" * 3000)]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[" * 10**5, None, *LONG],
    ids=["bytes", "nested", "pipe", "decimal", "hexadecimal", "binary", "sexagesimal"],
)
def test_a_configuration_that_is_none(content, tmp_path, capsys):
    path = tmp_path / "strange.yaml"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    of_flops = (LINEAR[0], "--input-shape", "1x2", "--args")
    for module, *words in ((flops, *of_flops), (profile, "--config"), (pipelines, "--config"), (inference,)):
        assert command(module, *words, path) == 2 and "strange.yaml" in capsys.readouterr().err


def test_a_later_run_that_measured_nothing_hides_no_earlier_one(tmp_path):
    file, later = write_profile(tmp_path / "a"), tmp_path / "a" / "profile-2.2" / "tool.jsonl"
    head = json.loads(file.read_text().splitlines()[0])
    later.parent.mkdir()
    later.write_text(json.dumps({**head, "started": "2026-11-23T10:00:00+00:00"}) + "\n")
    shown = run("summarize.py", tmp_path / "a").stdout
    assert "encoder" in shown and "1 later run" in shown and "profile-2.2" in shown


def test_of_two_folders_that_are_named_none_is_hidden_without_a_word(tmp_path):
    write_profile(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    both = run("summarize.py", tmp_path / "a", tmp_path / "b")
    assert both.stderr.count("1 run not shown") == 1 and run("summarize.py", tmp_path).stderr == ""

"""The package rnnt_bench: installed, from Python, and its command submit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import rnnt_bench
from rnnt_bench import api
from rnnt_bench.analysis import doubts
from rnnt_bench.cli import parser
from rnnt_bench.command import COMMANDS
from rnnt_bench.core import called
from rnnt_bench.pytest_plugin import not_slower  # noqa: F401
from rnnt_bench.tools import submit

from commands import ROOT, assert_user_error, rows_of, run
from fixtures_runs import change, records_of, timed, trace, write_records
from test_machines import ZEN5

pytest.importorskip("setuptools")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as pip installs it, beside an empty folder for caches."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", folder / "site", str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def installed_command(folder, cwd, *arguments):
    """Run the installed command in `cwd`."""
    variables = {"PYTHONPATH": f"{folder}/site", "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    line = [sys.executable, f"{folder}/site/bin/rnnt-bench", *arguments]
    return subprocess.run(line, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)


def test_nothing_but_the_package_is_installed_and_the_checkout_stays_as_it_was(installed):
    names = {path.name for path in (installed / "site").iterdir()}
    # fused_transducer is in its own wheel alone: an uninstalled rnnt-bench takes nothing of another package with it
    assert "rnnt_bench" in names
    assert not names & {"common", "losses", "requirements", "tests", "benchmark_all.py", "fused_transducer"}
    suite = installed / "site" / "rnnt_bench"
    needed = ("scripts/shape_info.pt", "scripts/benchmark_mine.py", "show/page.js")
    assert all((suite / name).is_file() for name in needed)
    assert not list(ROOT.glob("*.egg-info")) and not (ROOT / "build").exists()


def test_it_lists_the_losses_of_its_own_python(installed, tmp_path):
    done = installed_command(installed, tmp_path, "list")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("reference "))
    assert sys.executable in row and ".venv/main/bin" not in row.replace(sys.executable, "")
    assert "NAME@fast-mkl" in done.stdout and "NAME@k2" not in done.stdout  # it has no environments


def test_it_measures_where_it_stands(installed, tmp_path):
    files = sorted((installed / "site").rglob("*"))
    flags = ("--only", "fused,reference,k2", "--preset", "quick", "--passes", "correctness", "--quiet")
    done = installed_command(installed, tmp_path, "run", *flags)
    assert done.returncode == 0, done.stderr
    statuses = {name: row["status"] for name, row in rows_of(tmp_path / "log").items()}
    assert statuses == {"fused": "missing", "reference": "ok", "k2": "missing"}
    advice = done.stdout + done.stderr + (tmp_path / "log" / "details.txt").read_text()
    assert "pip install ./fused_transducer" in advice
    assert "rnnt-bench list" in advice and not re.search(r"make setup|make bench|see --list|[a-z]+\.py --", advice)
    assert (tmp_path / "log" / "report.html").is_file()
    again = installed_command(installed, tmp_path, "summarize", "--format", "json")
    assert again.returncode == 0 and '"reference"' in again.stdout
    assert sorted((installed / "site").rglob("*")) == files


def test_it_judges_where_it_stands_and_names_itself_in_a_mistake(installed, tmp_path):
    done = installed_command(installed, tmp_path, "check", "--only", "reference", "--cases", "ragged", "--quiet")
    assert done.returncode == 0 and (tmp_path / "log" / "check-corners" / "tool.jsonl").is_file(), done.stderr
    done = installed_command(installed, tmp_path, "run", "--frobnicate")
    assert done.returncode == 2 and done.stderr.startswith("rnnt-bench run: error: "), done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own(name):
    assert f"\n  {name} " in run("rnnt-bench", "--help").stdout
    text = run("rnnt-bench", name, "--help").stdout
    called = set(re.findall(r"rnnt-bench ([a-z-]+)", text))
    assert text.startswith(f"usage: rnnt-bench {name} ") and called <= {name, "report"}, text
    if name in ("run", "list", "largest", "sweep"):
        assert text.count(f"  rnnt-bench {name}") >= 2  # examples


def test_a_sweep_has_the_flags_that_it_can_use():
    text = run("rnnt-bench", "sweep", "--help-all").stdout
    assert "KEY=A,B" in text and "--rounds" in text
    assert not re.search(r"^  (--sweep|--budget) ", text, flags=re.MULTILINE)


def test_a_text_says_how_the_user_calls_a_command(monkeypatch):
    assert called.command("summarize") == "./summarize.py" and called.command("report") == "./rnnt-bench report"
    assert called.or_set_up("pip install x", "nemo") == "run `make setup ENVIRONMENTS=nemo`, or pip install x"
    monkeypatch.setattr(called, "INSTALLED", True)
    assert called.command("summarize") == "rnnt-bench summarize"
    assert called.or_set_up("pip install x") == "pip install x"


def test_a_typo_is_understood():
    wrong = run("rnnt-bench", "sumarize")
    assert wrong.returncode == 2 and "summarize" in wrong.stderr
    assert run("rnnt-bench", "--version").stdout.startswith("rnnt-bench 0.")


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("words, code", [(["preset=quick"], 2), (["ARGS=--sweep threads=1,2", "LOGDIR=a b"], 0)])
def test_a_variable_that_make_does_not_know_is_named(words, code):
    done = subprocess.run(["make", "-n", "-C", ROOT, "bench", *words], capture_output=True, text=True)
    assert done.returncode == code and ("preset" in done.stderr) == (code == 2), done.stderr


def test_no_folder_takes_the_name_of_a_public_function():
    """Once it is imported, a folder is an attribute of the package: it would be found in the function's place."""
    folders = {path.parent.name for path in (ROOT / "common").glob("*/__init__.py")}
    assert folders and not folders & set(rnnt_bench.__all__)


pytest.importorskip("torch")

#: A package with a right loss and a wrong one, and a name that the suite has too.
PACKAGE = """
import sys
sys.path.insert(0, {root!r})
from rnnt_bench.losses import topologies
del sys.path[0]

def loss(logits, targets, T_lengths, U_lengths, blank=0, reduction="mean"):
    return topologies.transducer_loss(logits, targets, T_lengths, U_lengths, blank=blank, reduction=reduction)

def broken(logits, targets, T_lengths, U_lengths):
    raise ValueError("as planned")

def negative(logits, targets, T_lengths, U_lengths):
    return -loss(logits, targets, T_lengths, U_lengths, reduction="none")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").touch()
    (folder / "mypackage" / "rnnt.py").write_text(PACKAGE.format(root=str(ROOT)))
    return folder


QUICK = ("--preset", "quick", "--device", "cpu", "--quiet")


def test_a_function_of_a_package_is_measured_as_a_row(folder, tmp_path):
    flags = ["--loss", "mypackage.rnnt:loss", "--loss", "minus=mypackage.rnnt:negative", "--skip", "all"]
    flags += ["--loss", "broken=mypackage/rnnt.py:broken"]
    done = run("benchmark_all.py", *flags, *QUICK, "--passes", "timing", "--log-dir", tmp_path, cwd=folder)
    rows = rows_of(tmp_path)
    assert done.returncode == 1 and rows.keys() == {"mypackage.rnnt.loss", "minus", "broken"}, done.stderr
    assert rows["mypackage.rnnt.loss"]["loss_ms"] > 0
    assert rows["minus"]["status"] == "error" and "log-likelihood" in rows["minus"]["reason"]
    assert rows["broken"]["status"] == "error" and "(rnnt.py, line " in rows["broken"]["reason"]
    assert {row["name"] for row in rnnt_bench.load(tmp_path)} == rows.keys()


LOST = {
    "nowhere.rnnt:loss": "nowhere",
    "mypackage.nowhere:loss": "mypackage.nowhere is not found",
    "mypackage.rnnt:nix": "no function nix",
    "nowhere.py:loss": "no such file",
    "mypackage/rnnt.py:negativ": "did you mean 'negative'",
    "broken.py:loss": "line 1: not Python",
    "loss": ":FUNCTION",
}


@pytest.mark.parametrize(
    "command", ["benchmark_all.py", "rnnt-bench sweep vocab-size=5", "rnnt-bench check", "rnnt-bench largest"]
)
def test_a_loss_that_is_not_there_is_one_line(command, folder):
    (folder / "broken.py").write_text("def loss(:")
    for loss, words in LOST.items():
        assert_user_error(run(*command.split(), "--loss", loss, cwd=folder), "--loss", words)


def test_a_function_that_a_file_may_make_is_no_mistake(folder):
    for number, text in enumerate(
        ["from mypackage.rnnt import *", "def __getattr__(name): ...", "globals()['made'] = 1"]
    ):
        (folder / f"maker{number}.py").write_text(text)
        assert parser.own_loss(f"{folder}/maker{number}.py:made") == f"maker{number}.made"


def test_a_function_of_a_file_is_checked(folder):
    result = rnnt_bench.check(f"{folder}/mypackage/rnnt.py:loss", cases="ragged", device="cpu")
    assert result.right and result.cells["ragged"]["result"] == "pass"
    wrong = rnnt_bench.check(f"{folder}/mypackage/rnnt.py:negative", cases="ragged", device="cpu")
    assert not wrong and wrong.findings[0].startswith("ragged: ")


SCRIPT = """
import json, sys
import torch
import common  # a package of the user's, which stays as it is
import rnnt_bench

def my_loss(logits, targets, T_lengths, U_lengths):
    from mypackage.rnnt import loss
    return loss(logits, targets, T_lengths, U_lengths, reduction="sum")

if __name__ == "__main__":
    rows = rnnt_bench.measure(my_loss, vocab_size=20, preset="quick", passes="timing", device="cpu")
    rnnt_bench.assert_is_transducer_loss(lambda *given: my_loss(*given))
    assert common.MINE and sys.modules["common"] is common
    frame = rows.to_frame()
    print(json.dumps([rows[0]["name"], rows[0]["status"], rows[0]["configuration"]["vocab_size"], len(frame)]))
"""


@pytest.mark.thorough
def test_a_script_measures_its_own_function(folder):
    (folder / "common.py").write_text("MINE = True\n")
    (folder / "mine.py").write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}  # as installed, with what else the checkout has
    line = [sys.executable, "mine.py"]
    done = subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["mine.my_loss", "ok", 20, 1]


COUNT = """
import sys, torch
import common  # a package of the user's, which stays as it is
from rnnt_bench import FlopCounter, flop_rules

class Doubled(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)

flop_rules.register(Doubled, lambda call: 1000)
with FlopCounter(torch.nn.Linear(3, 5)) as counter:
    Doubled.apply(torch.nn.functional.linear(torch.ones(2, 3), torch.ones(5, 3)))
assert common.MINE and sys.modules["common"] is common
print(*counter.total())
"""


def test_the_counter_of_operations_has_a_public_name_in_any_folder(installed, tmp_path):
    (tmp_path / "common.py").write_text("MINE = True\n")
    (tmp_path / "mine.py").write_text(COUNT)
    variables = {**os.environ, "PYTHONPATH": str(installed / "site")}
    line = [sys.executable, "mine.py"]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout.split() == ["30", str(60 + 10 + 1000)], done.stderr


def test_a_loss_of_a_users_is_measured_wherever_its_file_lies(installed, tmp_path):
    """The folder has a package named common beside it, which the suite's own folder is called too."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("def doubled(x):\n    return 2 * x\n")
    text = (ROOT / "benchmark_mine.py").read_text()
    body = text.replace("    import torch\n", "    import torch\n    from common import doubled\n")
    body = body.replace("return losses", "return 0.5 * doubled(losses)")
    assert body != text
    (tmp_path / "benchmark_flash.py").write_text(body)
    variables = {**os.environ, "PYTHONPATH": str(installed / "site"), "XDG_CACHE_HOME": f"{installed}/cache"}
    flags = ["--only", "reference", "--preset", "quick", "--passes", "correctness", "--quiet"]
    line = [sys.executable, "benchmark_flash.py", *flags]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = {name: row["status"] for name, row in rows_of(tmp_path / "log").items()}
    assert statuses == {"flash": "ok", "reference": "ok"}


def reference(logits, targets, T_lengths, U_lengths):
    from rnnt_bench.losses import topologies

    return topologies.transducer_loss(logits, targets, T_lengths, U_lengths, reduction="none")


def test_the_helper_for_tests_says_what_is_wrong():
    rnnt_bench.assert_is_transducer_loss(reference)
    with pytest.raises(AssertionError, match="mean over the batch"):
        rnnt_bench.assert_is_transducer_loss(lambda *given: reference(*given).mean())


@pytest.fixture
def measured_at(not_slower, tmp_path, monkeypatch):  # noqa: F811
    """Ask not_slower about a loss whose rounds take `ms`."""

    def check(*ms, strict=False, row=None, machine=None, flags=()):
        def measured(loss, log_dir, **given):
            shutil.rmtree(log_dir, ignore_errors=True)
            timed(log_dir, "torchaudio", ms, run_id=f"{ms} {machine}", machine=machine or ZEN5)
            change(log_dir / "torchaudio", "sample", flags=list(flags))
            return [{"name": "torchaudio", "status": "ok", **(row or {})}]

        monkeypatch.setattr(api, "measure", measured)
        not_slower("mine:loss", tmp_path / "baseline", percent=10, strict=strict)

    return check


def test_a_loss_that_became_slower_fails_a_test(measured_at):
    with pytest.raises(pytest.skip.Exception, match="baseline"):
        measured_at(10, 10.1, 9.9, 10)
    measured_at(10.1, 10, 9.9, 10)
    with pytest.raises(pytest.fail.Exception, match="torchaudio"):
        measured_at(20, 20.1, 19.9, 20)
    with pytest.raises(AssertionError, match="wrong result"):
        measured_at(10, 10, 10, row={"status": "error", "reason": "wrong result"})


NO_VERDICT = {
    "one round": ((10,), {}, "1 round"),
    "beside load": ((10, 10.1, 9.9, 10), {"flags": ["busy", "loaded"]}, "other load"),
    "another machine": ((10, 10.1, 9.9, 10), {"machine": {**ZEN5, "caches": {"L3": 2**20}}}, "L3"),
}


@pytest.mark.parametrize("name", NO_VERDICT)
def test_where_there_is_no_verdict_not_slower_skips_and_fails_if_strict(name, measured_at, tmp_path):
    ms, given, words = NO_VERDICT[name]
    if name != "another machine":  # nor is it kept as a baseline
        with pytest.raises(pytest.skip.Exception, match=words):
            measured_at(*ms, **given)
        assert not (tmp_path / "baseline").exists()
    with pytest.raises(pytest.skip.Exception, match="holds the baseline"):
        measured_at(10, 10.1, 9.9, 10)
    with pytest.raises(pytest.skip.Exception, match=words):
        measured_at(*ms, **given)
    with pytest.raises(pytest.fail.Exception, match=words):
        measured_at(*ms, strict=True, **given)


def test_a_closure_and_a_folder_without_results_are_errors(tmp_path):
    with pytest.raises(ValueError, match="top level"):
        rnnt_bench.measure(lambda *given: 0)
    with pytest.raises(ValueError, match="no runs"):
        rnnt_bench.load(tmp_path)


RESULTS = sorted(path for path in (ROOT / "results").iterdir() if path.is_dir())
#: Small, and whole.
WHOLE = next(path for path in RESULTS if path.name.endswith("-batch-30"))
SECRET = ("/home/jane/corpus", "jane", "speech-x", "ssn 123")


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_every_folder_of_results_is_complete_and_consistent(folder):
    found = list(submit.problems(folder))
    if folder.name.endswith("-judged"):  # stopped when its losses had been judged, as results/README.md says
        found = [problem for problem in found if not re.search("stopped before|timing-1: interrupted", problem)]
    assert not found


def test_a_log_becomes_a_folder_without_a_text_of_the_user(tmp_path):
    log = tmp_path / "log"
    shutil.copytree(WHOLE, log)
    path, head = "/home/jane/corpus/speech-x.pt", records_of(log / "003-fused")[0]
    settings, machine = {**head["settings"], "shape_file": path}, {**head["machine"], "os": f"Linux of jane, {path}"}
    settings["passes"] = [*settings["passes"], "trace"]
    command = [
        "/home/jane/benchmark_all.py",
        path,
        "--batch-size",
        "30",
        f"--only=fused,{path}",
        "--shape-file",
        "jane",
    ]
    command += ["--log-dir", "jane", "--sort-utterance", "--rounds=3"]
    variables = {"LD_PRELOAD": path, "OMP_NUM_THREADS": "2", path: "1", "OMP_JANE": "ssn 123", "MALLOC_X": "jane"}
    change(log / "003-fused", "run", new=path, command=command, settings=settings, machine=machine)
    options = {"durations": {"ours": "[0, 1]", "default": 1}, "file": {"ours": path, "default": "-"}}
    of_run = {"options": options, "variables": variables}
    change(log / "003-fused", "environment", new=path, shape_file=path, warnings=[path], **of_run)
    change(log / "003-fused", "status", new=path, reason="ssn 123", stderr_tail=["ssn 123"], code={path: "ssn 123"})
    errors = {"the sum over V of a cell's gradient in sum": 1e-6}
    (judged,) = [line for line in records_of(log / "003-fused") if line["record"] == "correctness"]
    change(log / "003-fused", "correctness", at_size={**judged["at_size"], "errors": errors})
    write_records(log / "003-fused", [*records_of(log / "003-fused"), *trace([])])
    (log / "report.html").write_text("x")
    (log / "003-fused" / "a.pt.trace.json").write_text('{"traceEvents": [], "a": "/home/jane/x.py"}')
    (log / "001-fast_rnnt").rename(tmp_path / "elsewhere")
    (log / "001-fast_rnnt").symlink_to(tmp_path / "elsewhere")
    done = run("rnnt-bench", "submit", log, "--into", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == "2026-11-27-amd-epyc-2-cores" and str(folder) in done.stdout
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"results.jsonl"}
    assert not [path for path in files if path.parent.name.endswith("fast_rnnt")]
    text = "".join(path.read_text() for path in files)
    assert not [secret for secret in SECRET if secret in text] and "OMP_NUM_THREADS" in text
    before, after = ({row.name: row for row in submit.rows_of(path)} for path in (WHOLE, folder))
    for name, row in after.items():
        assert row.status == before[name].status and row.step.ms == before[name].step.ms
        assert row.memory == before[name].memory and row.checked.grad_error == before[name].checked.grad_error
    lines = records_of(next(folder.glob("*-fused")))
    assert [line["record"] for line in lines].count("run") == 1
    assert after["fused"].checked.at_size.errors == errors and "trace" not in doubts.kinds(after["fused"])
    assert list(after["fused"].environment.variables) == ["LD_PRELOAD", "OMP_NUM_THREADS"]
    words = "benchmark_all.py --batch-size 30 --only ... --shape-file own --sort-utterance --rounds 3"
    assert " ".join(after["fused"].header.command) == words
    told = after["fused"].environment.options
    assert (told["durations"].ours, told["file"].ours, told["file"].default) == ("[0, 1]", "...", "-")
    assert_user_error(run("rnnt-bench", "submit", log, "--into", tmp_path / "results"), "is there already", "--name")


FAULTS = {
    "no revision": ("run", {"git_revision": None}),
    "uncommitted changes": ("run", {"git_dirty": True}),
    "do not say on which machine": ("run", {"machine": {}}),
    "beside other load": ("sample", {"flags": ["busy", "loaded"], "foreign_cpu": 0.9}),
    "--resume": ("run", {"settings": {**records_of(WHOLE / "003-fused")[0]["settings"], "rounds": 9}}),
    "it has 1 round, an interval needs 3": (
        "run",
        {"settings": {**records_of(WHOLE / "003-fused")[0]["settings"], "rounds": 1}},
    ),
    "of 2 devices": ("environment", {"device_name": "another"}),
}


def test_a_full_disk_leaves_nothing_of_a_folder_of_results(tmp_path, disk):
    results = disk(16)
    done = run("rnnt-bench", "submit", WHOLE, "--into", results)
    assert_user_error(done, "No space left", "--into")
    assert not list(results.iterdir())


def test_lines_that_cannot_be_read_are_no_whole_folder(tmp_path):
    shutil.copytree(WHOLE, tmp_path / "log")
    (tmp_path / "log" / "003-fused").rename(tmp_path / "log" / "fused-30")
    change(tmp_path / "log" / "fused-30", "sample", total_wall_ns="damaged")
    change(tmp_path / "log" / "fused-30", "run", git_revision=None)
    done = run("rnnt-bench", "submit", tmp_path / "log", "--into", tmp_path / "results")
    assert done.returncode == 1 and "fused-30: its records have no revision" in done.stderr
    assert "cannot be read" in done.stderr and "003" not in done.stderr
    assert not done.stdout and not any((tmp_path / "results").iterdir())
    check = run("rnnt-bench", "submit", "--check", tmp_path / "log")
    assert check.returncode == 1 and "fused-30" in check.stderr


@pytest.mark.parametrize("words", FAULTS)
def test_what_is_not_whole_is_refused_in_one_line(tmp_path, words):
    shutil.copytree(WHOLE, tmp_path / "kept")
    kind, fields = FAULTS[words]
    change(tmp_path / "kept" / "003-fused", kind, **fields)
    lines = list(submit.problems(tmp_path / "kept"))
    assert any(words in line for line in lines) and all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "benchmark_all.py --topology tdt --scope step --limits=false --sweep window=9,5 --batch-size 2",
        "losses/benchmark_fast_rnnt.py --preset cpu --in-place --skip k2,reference",
        "rnnt-bench sweep vocab-size=500,4096 --only fused",
    ],
)
def test_the_flags_that_say_what_was_measured_are_kept(line):
    further = ["--shape-file", "/home/me/mine.pt", "--log-dir", "/home/me/log", "--quiet"]
    kept = submit.flags_of([*f"/home/me/{line}".split(), *further])
    assert " ".join(kept) == line.replace("=f", " f") + " --shape-file own"

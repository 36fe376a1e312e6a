"""What the four commands about models have in common: flags, a smoke run, the total first, the report of a log."""

from __future__ import annotations

import json

import pytest
from commands import ROOT, run
from fixtures_model_runs import InProcess, write_profile

from common.analysis.logs import read_any
from common.core.errors import UserError
from common.core.guard import guarded
from common.show import page
from common.tools.flops import command as count_command
from common.tools.flops import show as counts
from common.tools.inference import command as inference_command
from common.tools.pipelines import command as pipelines_command
from common.tools.profile import command as profile_command
from common.tools.profile import rows as profile
from common.tools.profile import table as profile_tables

COMMANDS = {
    "rnnt-bench flops": count_command,
    "rnnt-bench pipelines": pipelines_command,
    "rnnt-bench inference": inference_command,
    "profile_model.py": profile_command,
}
pytestmark = pytest.mark.usefixtures("as_before")
LINEAR = ("torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=5", "--input-shape", "2x3")


def counted(log, *flags, code=0):
    arguments = count_command.parser().parse_args([*LINEAR, "--log-dir", str(log), *flags])
    assert guarded("x", lambda: count_command.main(arguments, InProcess())) == code


@pytest.mark.parametrize("script", COMMANDS)
def test_all_have_the_same_flags_and_a_line_in_the_help(script):
    flags = COMMANDS[script].parser()._option_string_actions
    assert {"--preset", "--timeout", "--format", "--quiet", "--log-dir"} <= flags.keys()
    assert flags["--preset"].choices == ("quick",)
    assert flags["--format"].choices == ("table", "markdown", "csv", "json")
    text = (ROOT / "Makefile").read_text()
    assert f"$(MAIN) {script} $(ARGS)" in text


# -- --preset quick --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"limits": True, "trace_steps": 2, "size": []}),
        (["--preset", "quick"], {"steps": 2, "limits": False, "batch_size": 1, "size": [("layers", "2")]}),
        (["--preset", "quick", "--steps", "4", "--size", "layers=3"], {"steps": 4, "size": [("layers", "3")]}),
        (["--preset", "quick", "--sort-utterance", "true"], {"max_frames": 1000, "batch_size": None}),
        (["--preset", "quick", "--model", "x:Y", "--limits", "true"], {"limits": True, "size": []}),
    ],
)
def test_a_quick_profile_of_a_step_is_of_a_small_model(words, expected):
    arguments = profile_command.parser().parse_args(words)
    profile_command._complete(arguments)
    assert {key: getattr(arguments, key) for key in expected} == expected


def test_a_quick_count_needs_no_input_and_no_weights(tmp_path, capsys):
    words = ["torchaudio.models:wav2vec2_base", "--preset", "quick", "--format", "json", "--log-dir", str(tmp_path)]
    arguments = count_command.parser().parse_args(words)
    assert guarded("x", lambda: count_command.main(arguments, InProcess())) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["buckets"][0]["longest_s"] == 1


@pytest.mark.parametrize("format", ["table", "markdown", "csv", "json"])
def test_a_profile_is_shown_in_each_format(format, tmp_path):
    write_profile(tmp_path)
    (kept,) = profile.find([tmp_path])
    text = profile_tables.render(kept.sizes, format)
    assert "encoder" in text
    if format == "json":
        assert [size["size"] for size in json.loads(text)] == ["batch-size 2", "batch-size 4"]
    if format == "markdown":
        assert "| label |" in text


# -- rnnt-bench flops in the log ---------------------------------------------------------------------------------------


def test_a_count_is_kept_and_the_report_shows_it(tmp_path, capsys):
    counted(tmp_path)
    assert "flops-torch.nn-Linear/flops.json" in capsys.readouterr().err
    (count,) = counts.find([tmp_path])
    assert (count.content.model, counts.parts_of(count.content.document)[-1].macs) == ("torch.nn:Linear", 30)
    text = page.page(read_any([tmp_path]).groups, tmp_path, paths=[tmp_path])
    assert "Operations of a model" in text and "torch.nn:Linear" in text and "30 MACs" in text
    done = run("summarize.py", tmp_path)
    assert done.returncode == 0 and "30 MACs" in done.stdout


def test_of_the_same_counts_the_newest_is_shown(tmp_path, capsys):
    for flags in ([], ["--by", "operator"], ["--backward"], ["--quiet"]):
        counted(tmp_path, *flags)
    assert len([*tmp_path.iterdir()]) == 4
    assert [(count.content.by, count.content.identity["backward"]) for count in counts.find([tmp_path])] == [
        ("module", True),
        ("module", False),
    ]


def test_a_count_that_cannot_be_kept_is_shown_all_the_same(tmp_path, capsys):
    (tmp_path / "log").write_text("a file")
    counted(tmp_path / "log")
    printed = capsys.readouterr()
    assert "30 MACs" in printed.out and "warning: " in printed.err and "--log-dir" in printed.err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"document": 1'])
def test_a_count_that_cannot_be_read_says_so(content, tmp_path):
    (tmp_path / "flops-x").mkdir()
    (tmp_path / "flops-x" / "flops.json").write_text(content)
    (count,) = counts.find([tmp_path])
    assert "cannot be read" in count.reason
    assert "cannot be read" in page.page([], tmp_path, paths=[tmp_path])
    assert "cannot be read" in run("summarize.py", tmp_path).stdout


def test_a_log_of_profiles_alone_has_a_report(tmp_path):
    with pytest.raises(UserError, match="no runs"):
        read_any([tmp_path])
    write_profile(tmp_path)
    assert not read_any([tmp_path]).groups
    assert "encoder" in run("summarize.py", tmp_path).stdout
    assert run("rnnt-bench", "report", tmp_path, "--output", tmp_path / "r.html").returncode == 0

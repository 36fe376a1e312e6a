"""Flags: the errors they give, the settings they become, and that asking for help costs nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import fields, make_dataclass
from typing import Optional

import pytest
from canned import parsed
from commands import ROOT, assert_user_error, run

from common import command
from common.cli.parser import Made, Parser, add_flags, given_settings, with_limits
from common.core import errors, flag_types, grid, settings
from common.core.errors import UserError
from common.core.implementations import IMPLEMENTATIONS
from common.core.settings import declared, setting
from common.data import shapes

SCRIPTS = [implementation.file for implementation in IMPLEMENTATIONS]
MOST_THREADS = 4 * len(os.sched_getaffinity(0))


def given(*words):
    return given_settings(parsed(*words))


@pytest.mark.parametrize("script", [*SCRIPTS, "benchmark_all.py"])
def test_every_script_takes_the_flag_of_every_setting(script):
    text, path = run(script, "--help-all").stdout, ROOT / script
    assert not [declaration.flag for declaration in settings.SETTINGS.values() if declaration.flag not in text]
    assert path.stat().st_mode & 0o111 and path.read_text().startswith("#!/usr/bin/env python3\n")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch-size", "0"], ["--batch-size", "at least 1"]),
        (["--batch-size", "many"], ["--batch-size", "whole number", "many"]),
        (["--max-frames", "-5"], ["--max-frames"]),
        (["--vocab-size", "1"], ["--vocab-size", "at least 2"]),
        (["--device", "tpu"], ["--device", "cuda", "tpu"]),
        (["--device", "cpu:1"], ["--device"]),
        (["--dtype", "int8"], ["--dtype", "int8"]),
        (["--sort-utterance", "maybe"], ["--sort-utterance", "true or false", "maybe"]),
        (["--passes", "timing,heat"], ["--passes", "heat"]),
        (["--schedule", "wait=1,active=2"], ["--schedule", "warmup"]),
        (["--schedule", "wait=1,warmup=1,active=0,repeat=1"], ["--schedule", "at least 1"]),
        (["--shape-file", "/nowhere/shape_info.pt"], ["--shape-file", "/nowhere/shape_info.pt", "no such file"]),
        (["--min-duration", "5", "--max-duration", "2"], ["--min-duration 5"]),
        (["--threads", str(MOST_THREADS + 1)], [f"must be at most {MOST_THREADS}"]),
        (["--sweep", f"threads=1,{MOST_THREADS + 1}"], [f"must be at most {MOST_THREADS}"]),
        (["--max-frames", "500", "--only", "reference"], ["--max-frames only applies with --sort-utterance true"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--only", "torchaudio,k3"], ["--only", "k3"]),
        (["--only", "k2", "--skip", "k2"], ["--skip"]),
        (["--only", "k2:sideways"], ["--only", "k2:modified"]),
        (["--log-dir="], ["must not be empty"]),
        (["--shape-file="], ["must not be empty"]),
        (["--prest", "quick"], ["did you mean '--preset'?"]),
        (["--vocabsize=500"], ["did you mean '--vocab-size'?"]),
        (["--preset", "qick"], ["did you mean 'quick'?"]),
        (["--only", "torchaudo,k2"], ["did you mean 'torchaudio'?"]),
        (["--budget", "20"], ["--budget", "unit"]),
        (["--budget", "1m", "--sweep", "vocab-size=9,10"], ["--budget"]),
        (["--budget", "1m", "--find-largest", "batch-size"], ["--budget"]),
        (["--allocator", "reus"], ["did you mean 'reuse'?"]),
        (["--sweep", "vocb-size=5,6"], ["did you mean 'vocab-size'?"]),
    ],
)
def test_bad_flags(arguments, words, tmp_path):
    assert_user_error(run("benchmark_all.py", *arguments, cwd=tmp_path), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, words",
    [
        ({"tf32": True}, ["--tf32", "CUDA"]),
        ({"l2": "warm"}, ["--l2", "CUDA"]),
        ({"memory_limit": "1GB"}, ["--memory-limit", "--find-largest batch-size or max-frames"]),
    ],
)
def test_a_setting_without_effect_is_refused(given, words):
    with pytest.raises(UserError) as refused:
        settings.resolve(given, "cpu")
    assert all(word in str(refused.value) for word in words) and "remove" in str(refused.value)
    assert settings.resolve({"tf32": True, "l2": "warm"}, "cuda:1").tf32


def test_words_are_understood_in_several_ways():
    assert all(map(flag_types.str2bool, ("true", "yes", "T", "y", "1")))
    assert not any(map(flag_types.str2bool, ("false", "NO", "f", "n", "0")))
    assert [flag_types.device(text) for text in ("gpu", "gpu:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    assert given("--dtype", "fp16")["dtype"] == "float16"
    assert [flag_types.duration(text) for text in ("90s", "5m", "0.5h")] == [90, 300, 1800]
    assert flag_types.parts("seed") == flag_types.parts("full") == ("full", "bpe500")


def test_presets_follow_the_device_and_flags_win():
    full, small = settings.resolve(given(), "cuda"), settings.resolve(given(), "cpu")
    assert (full.preset, full.batch_size, full.num_batches, full.trace_steps) == ("full", 30, 14, 80)
    assert small.preset == "cpu" and small.batch_size < 30 and small.vocab_size == 500 and small.batches == "random"
    flags_of_run = ["--preset", "full", "--batch-size", "7", "--schedule", "wait=0,warmup=1,active=2,repeat=3"]
    mixed = settings.resolve(given(*flags_of_run, "--passes", "trace,timing"), "cpu")
    assert (mixed.suffix, mixed.trace_steps) == ("7", 9) and mixed.passes == ("correctness", "timing", "trace")
    ordered = settings.resolve(given("--sort-utterance", "true", "--preset", "full", "--spread", "5%"), "cpu")
    assert (ordered.batches, ordered.suffix, ordered.spread) == ("spread", "max-frames-10000", pytest.approx(0.05))
    assert settings.Settings.from_json(json.loads(json.dumps(ordered.to_json()))) == ordered


@pytest.mark.parametrize("preset, measured", [(None, True), ("quick", False), ("quick,chars", False), ("cpu", True)])
def test_the_limits_are_not_measured_in_a_smoke_run(preset, measured):
    chosen = settings.resolve({"preset": preset}, "cpu")
    assert with_limits(parsed(), chosen) is measured and with_limits(parsed("--limits", "true"), chosen) is True


def test_the_vocabulary_is_that_of_the_shape_file(tiny_shapes):
    file = ["--shape-file", str(tiny_shapes)]
    shapes.path_of(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": 100}}))
    assert settings.resolve(given(*file), "cpu").vocab_size == 100
    assert settings.resolve({**given(*file), "preset": "chars"}, "cpu").vocab_size == 30
    assert settings.resolve(given(*file, "--vocab-size", "7"), "cpu").vocab_size == 7
    shapes.path_of(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": "many"}}))
    assert settings.resolve(given(*file), "cpu").vocab_size == 500


# Help and lists.


@pytest.mark.parametrize("script", ["benchmark_all.py", "benchmark_ot.py", "benchmark_mine.py"])
def test_help_is_short_and_names_flags_that_are_there(script):
    """About 25 lines of flags and five examples, which parse."""
    short, every = run(script, "--help").stdout, run(script, "--help-all").stdout
    lines = short.splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 100 and len(every.splitlines()) > 100
    named = set(re.findall(r"--[a-z][a-z-]+", short)) - {"--list"}  # of benchmark_all.py
    assert len(named) >= 15 and not {flag for flag in named if not re.search(rf"{flag}\b", every)}
    examples = [line.split("     ")[0].split()[1:] for line in lines if line.startswith(f"  {script} ")]
    assert len(examples) == 5 and all(parsed(*words) for words in examples)


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_is_written_in_sentences(name, monkeypatch):
    """A capital first; a full stop, or the default, at the end."""
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command puts others in their place
    monkeypatch.setattr(errors, "program_called", errors.program_called)
    monkeypatch.setattr(errors, "names_of_scripts", {**errors.names_of_scripts})
    monkeypatch.setattr(Parser, "hands_over", True)
    with pytest.raises(Made) as made:
        command.main([name])
    for action in made.value.parser._actions:
        text = (action.help or "") % {**vars(action), "prog": made.value.parser.prog}
        where = f"{name} {action.option_strings or action.dest}: {text}"
        assert re.match("[A-Z]", text) and re.search(r"[.]$|Default: \S", text), where
        short = getattr(action, "short", "")
        assert not short or re.fullmatch("[A-Z].*[.]", short), where


def test_the_list_says_what_each_row_lacks():
    rows = {line.split()[0]: line for line in run("benchmark_all.py", "--list", "--device", "cpu").stdout.splitlines()}
    assert {implementation.name for implementation in IMPLEMENTATIONS} <= set(rows) and "k2:constrained" in rows
    assert "runs on cuda only" in rows["apex"] or "missing" in rows["apex"]
    if importlib.util.find_spec("warprnnt_pytorch") is None:
        assert "missing: " in rows["warp-transducer"] and "github.com/" in rows["warp-transducer"]
    assert "missing" not in rows["reference"]


def test_completions_answer_the_shell_and_import_nothing_without_it(tmp_path):
    """A stub stands in for argcomplete."""
    (tmp_path / "argcomplete.py").write_text("def autocomplete(parser): print('asked'); raise SystemExit(0)")
    where = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run("benchmark_all.py", "--help", env={**where, "_ARGCOMPLETE": "1"}).stdout == "asked\n"
    assert "asked" not in run("benchmark_all.py", "--help", env=where).stdout


# A setting is declared in one place.

GRAIN = setting(
    3,
    settings.BATCHES,
    "grains of each batch",
    short="grains",
    type=flag_types.whole(1),
    metavar="G",
    presets={"quick": 1, "chars": 2},
    label="grain",
    heading="{} grains",
    heading_of_default=False,
)


@pytest.fixture
def with_grain(monkeypatch):
    """The settings with one more, declared as any other."""
    extended = make_dataclass("More", [("grain", Optional[int], GRAIN)], bases=(settings.Settings,), frozen=True)
    known = declared(fields(extended))
    monkeypatch.setattr(settings, "Settings", extended)
    monkeypatch.setitem(settings.SETTINGS, "grain", known["grain"])
    monkeypatch.setitem(settings.SWEEPABLE, "grain", known["grain"])


def test_one_field_makes_a_setting(with_grain):
    parser = Parser()
    add_flags(parser)
    assert parser.parse_args([]).grain is None and parser.parse_args(["--grain", "7"]).grain == 7
    assert "grains of each batch. Default: 3 (1 with quick; 2 with chars)" in " ".join(parser.format_help().split())
    presets_of = [{}, {"preset": "quick"}, {"preset": "quick,chars"}, {"preset": "quick", "grain": 9}]
    assert [settings.resolve(given, "cpu").grain for given in presets_of] == [3, 1, 2, 9]
    assert grid.axis("grain=1,2") == ("grain", (1, 2))
    known = settings.in_rows({"grain": 5}, "cpu", "exact")
    assert known["grain"] == 5 and "5 grains" in settings.heading(known)
    assert "3 grains" not in settings.heading({"grain": 3}) and settings.described({"grain": 5}, (settings.BATCHES,))

"""Flags: the errors they give, the settings they become, and that asking for help costs nothing."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys

import pytest
from commands import ROOT, assert_user_error, run

from common import command
from common.cli import flags
from common.cli.parser import Made, Parser, given_settings, with_limits
from common.core import flag_types, guard, settings
from common.core.errors import UserError
from common.core.implementations import IMPLEMENTATIONS
from common.data.shapes import path_of

SCRIPTS = [implementation.file for implementation in IMPLEMENTATIONS]


@pytest.mark.parametrize("script", [*SCRIPTS, "benchmark_all.py"])
def test_every_script_takes_the_same_flags(script):
    text = run(script, "--help-all").stdout
    flags = (
        "shape-file device dtype batch-size max-frames sort-utterance batches vocab-size encoder-dim preset schedule "
    )
    flags += "passes scope sweep rounds threads seed log-dir quiet denormals pruned-recipe"
    missing = [flag for flag in flags.split() if f"--{flag}" not in text]
    assert not missing
    assert text.count("Default:") >= 20


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch-size", "0"], ["--batch-size", "at least 1"]),
        (["--batch-size", "many"], ["--batch-size", "whole number", "many"]),
        (["--max-frames", "0"], ["--max-frames", "at least 1"]),
        (["--max-frames", "-5"], ["--max-frames"]),
        (["--vocab-size", "1"], ["--vocab-size", "at least 2"]),
        (["--device", "tpu"], ["--device", "cuda", "tpu"]),
        (["--device", "cpu:1"], ["--device"]),
        (["--dtype", "int8"], ["--dtype", "int8"]),
        (["--sort-utterance", "maybe"], ["--sort-utterance", "true or false", "maybe"]),
        (["--passes", "timing,heat"], ["--passes", "heat"]),
        (["--schedule", "wait=1,active=2"], ["--schedule", "warmup"]),
        (["--schedule", "wait=1,warmup=1,active=0,repeat=1"], ["--schedule", "at least 1"]),
        (["--rounds", "0"], ["--rounds"]),
        (["--shape-file", "/nowhere/shape_info.pt"], ["--shape-file", "/nowhere/shape_info.pt", "no such file"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_bad_flags(arguments, words):
    assert_user_error(run("benchmark_torchaudio.py", *arguments), *words)


@pytest.mark.parametrize(
    "flags, meant",
    [
        (["--prest", "quick"], "--preset"),
        (["--vocabsize=500"], "--vocab-size"),
        (["--preset", "qick"], "quick"),
        (["--only", "torchaudo,k2"], "torchaudio"),
        (["--passes", "memry"], "memory"),
        (["--allocator", "reus"], "reuse"),
        (["--dtype", "flaot16"], "float16"),
        (["--sweep", "vocb-size=5,6"], "vocab-size"),
    ],
)
def test_a_typo_gets_the_word_that_was_meant(flags, meant):
    assert_user_error(run("benchmark_all.py", *flags), f"did you mean {meant!r}?")


def test_other_names_of_devices_and_dtypes_are_understood():
    assert [flag_types.device(text) for text in ("gpu", "gpu:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    assert parsed("--dtype", "fp16")["dtype"] == "float16" and parsed("--amp", "bf16")["amp"] == "bfloat16"
    assert parsed("--dtype", "torch.float64")["dtype"] == "float64"


def test_unknown_implementation():
    assert_user_error(run("benchmark_all.py", "--only", "torchaudio,k3"), "--only", "k3")
    assert_user_error(run("benchmark_all.py", "--only", "k2", "--skip", "k2"), "--skip")


@pytest.mark.parametrize("text", ["true", "True", "yes", "T", "y", "1"])
def test_true(text):
    assert flag_types.str2bool(text) is True


@pytest.mark.parametrize("text", ["false", "NO", "f", "n", "0"])
def test_false(text):
    assert flag_types.str2bool(text) is False


def parsed(*arguments):
    parser = Parser()
    flags.add_flags(parser)
    return given_settings(parser.parse_args(arguments))


def test_presets_follow_the_device_and_flags_win():
    full = settings.resolve(parsed(), "cuda")
    assert (full.preset, full.batch_size, full.num_batches, full.suffix) == ("full", 30, 14, "30")
    assert full.max_samples == 2 * full.num_batches  # more batches and processes, fewer repeats
    assert full.schedule == {"wait": 10, "warmup": 10, "active": 20, "repeat": 2} and full.trace_steps == 80
    small = settings.resolve(parsed(), "cpu")
    assert small.preset == "cpu" and small.batch_size < 30 and small.vocab_size == 500 and small.encoder_dim == 512
    mixed = settings.resolve(
        parsed("--preset", "full", "--batch-size", "7", "--schedule", "wait=0,warmup=1,active=2,repeat=3"), "cpu"
    )
    assert (mixed.suffix, mixed.trace_steps) == ("7", 9)


def test_batches_stand_for_the_file_by_default():
    chosen = settings.resolve(parsed("--sort-utterance", "true", "--preset", "full"), "cpu")
    assert (chosen.batches, chosen.suffix) == ("spread", "max-frames-10000")
    assert settings.resolve(parsed(), "cpu").batches == "random"
    assert settings.resolve(parsed("--sort-utterance", "yes", "--batches", "longest"), "cpu").batches == "longest"


def test_correctness_is_never_left_out():
    assert settings.resolve(parsed("--passes", "trace,timing"), "cpu").passes == ("correctness", "timing", "trace")


def test_settings_survive_json():
    chosen = settings.resolve(parsed("--scope", "step", "--spread", "5%"), "cpu")
    assert settings.Settings.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    assert chosen.scopes == ("step",) and chosen.spread == pytest.approx(0.05)


def test_scripts_are_executable():
    for script in [*SCRIPTS, "benchmark_all.py", "generate_shape_info.py", "summarize.py"]:
        path = ROOT / script
        assert path.stat().st_mode & 0o111 and path.read_text().startswith("#!/usr/bin/env python3\n")


def test_wrong_words_are_argparse_errors():
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        flag_types.positive("0")


@pytest.mark.skipif(not sys.prefix.endswith(".venv/main"), reason="about the environment that `make setup` makes")
@pytest.mark.parametrize("package", ["torch", "torchaudio", "lhotse", "sentencepiece", "msgspec", "tqdm", "ninja"])
def test_the_main_environment_has_what_the_scripts_import(package):
    """Elsewhere a missing package skips tests; there it would hide that the lock file lacks it."""
    importlib.import_module(package)


def test_variants_are_chosen_by_name_and_by_flag():
    done = run("benchmark_ot.py", "--variant", "sideways")
    assert_user_error(done, "--variant", "log-probs", "modified", "sideways")
    assert_user_error(run("benchmark_all.py", "--only", "k2:sideways"), "--only", "k2:modified")
    listed = run("benchmark_all.py", "--list").stdout
    assert "k2:constrained" in listed and "constrained" in listed


@pytest.mark.parametrize(
    "command",
    [
        ("benchmark_all.py", "--log-dir", ""),
        ("benchmark_torchaudio.py", "--log-dir="),
        ("benchmark_torchaudio.py", "--shape-file="),
        ("rnnt-bench", "compare", "--rev", "main", "--rev", "main", "--log-dir", ""),
        ("rnnt-bench", "compare", "", "log"),
        ("rnnt-bench", "compare", "--in", "", "a", "b"),
        ("summarize.py", ""),
        ("rnnt-bench", "report", ""),
        ("rnnt-bench", "check", "--output", ""),
    ],
    ids=" ".join,
)
def test_an_empty_name_is_not_the_current_folder(command, tmp_path):
    assert_user_error(run(*command, cwd=tmp_path), "must not be empty")
    assert not list(tmp_path.iterdir())


def test_threads_that_would_stop_the_machine_are_refused():
    most = 4 * len(os.sched_getaffinity(0))
    assert flag_types.threads(str(most)) == most
    for flag in (["--threads", str(most + 1)], ["--sweep", f"threads=1,{most + 1}"]):
        assert_user_error(run("benchmark_torchaudio.py", *flag), f"must be at most {most}", str(most + 1))


@pytest.mark.parametrize("script", ["benchmark_all.py", "benchmark_ot.py", "benchmark_mine.py"])
def test_help_is_short_and_names_flags_that_are_there(script):
    """About 25 lines of flags and five examples, which parse."""
    short, every = run(script, "--help").stdout, run(script, "--help-all").stdout
    lines = short.splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 100 and len(every.splitlines()) > 100
    named = set(re.findall(r"--[a-z][a-z-]+", short)) - {"--list"}  # of benchmark_all.py
    assert len(named) >= 15 and not {flag for flag in named if not re.search(rf"{flag}\b", every)}
    assert ("--only" in short) is (script != "benchmark_ot.py")
    examples = [line.split("     ")[0].split() for line in lines if line.startswith(f"  {script} ")]
    assert len(examples) == 5
    for _, *words in examples:
        parser = Parser()
        flags.add_flags(parser)
        parser.parse_args(words)


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_is_written_in_sentences(name, monkeypatch):
    """A capital first; a full stop, or the default, at the end."""
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command puts others in their place
    monkeypatch.setattr(guard, "program_called", guard.program_called)
    monkeypatch.setattr(guard, "names_of_scripts", {**guard.names_of_scripts})
    monkeypatch.setattr(Parser, "hands_over", True)
    with pytest.raises(Made) as made:
        command.main([name])
    for action in made.value.parser._actions:
        text = (action.help or "") % {**vars(action), "prog": made.value.parser.prog}
        where = f"{name} {action.option_strings or action.dest}: {text}"
        assert re.match("[A-Z]", text) and re.search(r"[.]$|Default: \S", text), where
        short = getattr(action, "short", "")
        assert not short or re.fullmatch("[A-Z].*[.]", short), where


@pytest.mark.parametrize("preset, measured", [(None, True), ("quick", False), ("quick,chars", False), ("cpu", True)])
def test_the_limits_are_not_measured_in_a_smoke_run(preset, measured):
    parser = Parser()
    flags.add_flags(parser)
    chosen = settings.resolve({"preset": preset}, "cpu")
    assert with_limits(parser.parse_args([]), chosen) is measured
    assert with_limits(parser.parse_args(["--limits", "true"]), chosen) is True


def test_the_list_says_what_each_row_lacks():
    rows = {line.split()[0]: line for line in run("benchmark_all.py", "--list", "--device", "cpu").stdout.splitlines()}
    assert {implementation.name for implementation in IMPLEMENTATIONS} <= set(rows)
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


def test_the_vocabulary_is_that_of_the_shape_file(tiny_shapes):
    path_of(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": 100}}))
    given = parsed("--shape-file", str(tiny_shapes))
    assert settings.resolve(given, "cpu").vocab_size == 100
    assert settings.resolve({**given, "preset": "chars"}, "cpu").vocab_size == 30
    assert settings.resolve(parsed("--shape-file", str(tiny_shapes), "--vocab-size", "7"), "cpu").vocab_size == 7
    path_of(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": "many"}}))
    assert settings.resolve(parsed("--shape-file", str(tiny_shapes)), "cpu").vocab_size == 500


def test_durations_that_leave_nothing_are_refused():
    with pytest.raises(UserError, match="--min-duration 5"):
        parsed("--min-duration", "5", "--max-duration", "2")


def test_the_older_pruned_step_runs_in_a_smoke_run():
    chosen = settings.resolve({"preset": "quick", "pruned_recipe": "benchmark-2022"}, "cpu")
    assert chosen.encoder_dim >= chosen.vocab_size
    assert settings.resolve({"preset": "quick"}, "cpu").encoder_dim == 32

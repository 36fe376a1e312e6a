"""Flags: the errors they give, the settings they become, and that asking for help costs nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from rnnt_bench.cli import listing
from rnnt_bench.cli.parser import add_flags, read_settings, with_limits
from rnnt_bench.core import flag_types, settings
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import IMPLEMENTATIONS
from rnnt_bench.core.settings import declare, declared
from rnnt_bench.data import shapes
from rnnt_bench.records.schema import typed
from rnnt_bench.setup import interpreters

from canned import parsed
from commands import ROOT, assert_user_error, run
from fixtures_runs import write_run

pytest.importorskip("torch")
SCRIPTS = [implementation.file for implementation in IMPLEMENTATIONS]


def given(*words):
    return read_settings(parsed(*words))


@pytest.mark.parametrize("script", [*SCRIPTS, "benchmark_all.py"])
def test_every_script_takes_the_flag_of_every_setting(script):
    text, path = run(script, "--help-all").stdout, ROOT / script
    assert not [each.flag for each in settings.SETTINGS.values() if bool(each.help) != (f"{each.flag} " in text)]
    assert path.stat().st_mode & 0o111 and path.read_text().startswith("#!/usr/bin/env python3\n")


def test_words_are_understood_in_several_ways():
    assert all(map(flag_types.str2bool, ("true", "yes", "T", "y", "1")))
    assert not any(map(flag_types.str2bool, ("false", "NO", "f", "n", "0")))
    assert [flag_types.device(text) for text in ("gpu", "gpu:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    assert given("--dtype", "fp16")["dtype"] == "float16"
    assert [flag_types.duration(text) for text in ("90s", "5m", "0.5h")] == [90, 300, 1800]
    assert {flag_types.not_negative(text) for text in ("0", "0.00", ".0", "-0", "0e5")} == {0.0}
    with pytest.raises(UserError):
        flag_types.not_negative("-0.1")
    assert flag_types.size_and_workload("seed") == flag_types.size_and_workload("full") == ("full", "bpe500")


def test_presets_follow_the_device_and_flags_win():
    full, small = settings.resolve(given(), "cuda"), settings.resolve(given(), "cpu")
    assert (full.preset, full.batch_size, full.num_batches, full.trace_steps) == ("full", 30, 14, 80)
    assert small.preset == "cpu" and small.batch_size < 30 and small.vocab_size == 500 and small.batches == "random"
    flags_of_run = ["--preset", "full", "--batch-size", "7", "--passes", "trace,timing"]
    schedule = {"wait": 0, "warmup": 1, "active": 2, "repeat": 3}
    mixed = settings.resolve({**given(*flags_of_run), "schedule": schedule}, "cpu")
    assert (mixed.suffix, mixed.trace_steps) == ("7", 9) and mixed.passes == ("correctness", "timing", "trace")
    assert settings.resolve({"tf32": True, "l2": "warm"}, "cuda:1").tf32
    ordered = settings.resolve(given("--sort-utterance", "true", "--preset", "full"), "cpu")
    assert (ordered.batches, ordered.suffix) == ("spread", "max-frames-10000")
    assert typed(json.loads(json.dumps(ordered.to_json())), settings.Settings) == ordered


@pytest.mark.parametrize("preset, measured", [(None, True), ("quick", False), ("quick,chars", False), ("cpu", True)])
def test_the_limits_are_not_measured_in_a_smoke_run(preset, measured):
    chosen = settings.resolve({"preset": preset}, "cpu")
    assert with_limits(parsed(), chosen) is measured and with_limits(parsed("--limits", "true"), chosen) is True


def test_the_vocabulary_is_that_of_the_shape_file(tiny_shapes):
    file = ["--shape-file", str(tiny_shapes)]
    shapes.provenance_file(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": 100}}))
    assert settings.resolve(given(*file), "cpu").vocab_size == 100
    assert settings.resolve({**given(*file), "preset": "chars"}, "cpu").vocab_size == 30
    assert settings.resolve(given(*file, "--vocab-size", "7"), "cpu").vocab_size == 7
    shapes.provenance_file(tiny_shapes).write_text(json.dumps({"bpe_model": {"vocab_size": "many"}}))
    assert settings.resolve(given(*file), "cpu").vocab_size == 500


@pytest.mark.parametrize("script", ["benchmark_all.py", "benchmark_ot.py", "benchmark_mine.py"])
def test_help_is_short_and_names_flags_that_are_there(script):
    short, every = run(script, "--help").stdout, run(script, "--help-all").stdout
    lines = short.splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 100 and len(every.splitlines()) > 100
    named = set(re.findall(r"--[a-z][a-z-]+", short)) - {"--list"}  # of benchmark_all.py
    assert len(named) >= 15 and not {flag for flag in named if not re.search(rf"{flag}\b", every)}
    examples = [line.split("     ")[0].split()[1:] for line in lines if line.startswith(f"  {script} ")]
    assert len(examples) == 4 and all(parsed(*words) for words in examples)


def test_the_list_says_what_each_row_lacks():
    # in a process of its own: this one may know losses of other tests, whose files are gone
    listed = run("benchmark_all.py", "--list", "--device", "cpu", env=None)
    rows = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert {implementation.name for implementation in IMPLEMENTATIONS} <= set(rows) and "k2:constrained" in rows
    for name in ("apex", "transformers:kernel"):
        assert "runs on cuda only" in rows[name] or "missing" in rows[name]
    kinds = {"apex": "exact", "optimized_transducer:modified": "modified-last-blank", "k2-pruned:hat": "pruned"}
    assert len({rows[name].index(f" {kind} ") for name, kind in kinds.items()}) == 1, "the columns are not aligned"
    assert not any("environment" in row for row in rows.values() if "unsupported" in row)
    if importlib.util.find_spec("warprnnt_pytorch") is None:
        assert "missing: " in rows["warp-transducer"] and "github.com/" in rows["warp-transducer"]
    assert "missing" not in rows["reference"]


def test_a_python_without_torch_runs_no_row(monkeypatch):
    monkeypatch.setattr(listing, "output", lambda *_, **__: "[]")
    told = listing.states_of({"fast_rnnt": interpreters.Choice(Path("/usr/bin/python3"))}, "cpu")
    assert told["fast_rnnt"].startswith("missing: /usr/bin/python3 lacks torch: ")


def test_completions_answer_the_shell_and_import_nothing_without_it(monkeypatch):
    asked = SimpleNamespace(autocomplete=lambda parser: sys.exit("asked"))
    monkeypatch.setitem(sys.modules, "argcomplete", asked)
    assert "asked" not in str(run("benchmark_all.py", "--help").returncode)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert run("benchmark_all.py", "--help").returncode == "asked"


TITLES = {"short": "grains", "metavar": "G", "label": "grain", "heading": "{} grains", "default_is_usual": True}
PRESETS = {"quick": 1, "chars": 2}
GRAIN = declare(3, "grains of each batch", settings.BATCHES, type=flag_types.Whole(1), presets=PRESETS, **TITLES)


def test_one_field_makes_a_setting(monkeypatch):
    extended = make_dataclass("More", [("grain", int | None, GRAIN)], bases=(settings.Settings,), frozen=True)
    known = declared(fields(extended))["grain"]
    monkeypatch.setattr(settings, "Settings", extended)
    monkeypatch.setitem(settings.SETTINGS, "grain", known)
    monkeypatch.setitem(settings.SWEEPABLE, "grain", known)
    parser = Parser()
    add_flags(parser)
    assert parser.parse_args([]).grain is None and parser.parse_args(["--grain", "7"]).grain == 7
    assert "grains of each batch. Default: 3 (1 with quick; 2 with chars)" in " ".join(parser.format_help().split())
    presets_of = [{}, {"preset": "quick"}, {"preset": "quick,chars"}, {"preset": "quick", "grain": 9}]
    assert [settings.resolve(given, "cpu").grain for given in presets_of] == [3, 1, 2, 9]
    assert settings.axis("grain=1,2") == ("grain", (1, 2))
    known = settings.in_rows({"grain": 5}, "cpu", "exact")
    assert known["grain"] == 5 and "5 grains" in settings.heading(known)
    assert "3 grains" not in settings.heading({"grain": 3}) and settings.described({"grain": 5}, (settings.BATCHES,))


# What users get wrong elsewhere: a file, YAML.  One clear line with the thing and the value, exit code 2, at once.

#: Files of the folder {}, by name.
FILES = {
    "nonsense.pt": "no tensor",
    "benchmark_broken.py": "def nothing_of_that_kind(:",
    "twice.yaml": "general: {a: 1, a: 2}\n",
    "code.yaml": "general: !!python/object/apply:os.system ['true']\n",
    "list.yaml": "- 1\n",
    "date.yaml": "a: 2026-13-41\n",
    "open.yaml": "a: [1\n",
    "nonsense.jsonl": "{\n",
}
MEASURE = "benchmark_torchaudio.py --in-place --device cpu"
MOST_THREADS = 4 * len(os.sched_getaffinity(0))
#: A command line, and words of its one line on stderr.
BAD_INPUTS = [
    (f"{MEASURE} --rounds none", "--rounds whole number none"),
    (f"{MEASURE} --rounds 1000000000", "--rounds at most 10000"),
    ("rnnt-bench largest --memory-limit 1e308GiB", "--memory-limit at most"),
    ("rnnt-bench largest --only fused --scope loss,step", "--scope one of"),
    (f"{MEASURE} --tf32 true", "--tf32 needs CUDA remove"),
    (f"{MEASURE} --l2 warm", "--l2 CUDA"),
    (f"{MEASURE} --vocab-size 1", "--vocab-size at least 2"),
    (f"{MEASURE} --sort-utterance maybe", "--sort-utterance true or false maybe"),
    (f"{MEASURE} --passes timing,heat", "--passes heat"),
    (f"{MEASURE} --min-duration 5 --max-duration 2", "--min-duration 5"),
    (f"{MEASURE} --threads {MOST_THREADS + 1}", f"must be at most {MOST_THREADS}"),
    (f"{MEASURE} --sweep threads=1,{MOST_THREADS + 1}", f"must be at most {MOST_THREADS}"),
    (f"{MEASURE} --max-frames 500", "--max-frames only applies with --sort-utterance true"),
    (f"{MEASURE} --max-frames-padded", "--max-frames-padded only applies with --sort-utterance true"),
    (f"{MEASURE} --sigma 0.05", "--sigma only applies tdt multi-blank --only"),
    (f"{MEASURE} --durations 0,1", "--durations only applies tdt"),
    (f"{MEASURE} --prune-range 3", "--prune-range only applies pruned"),
    (f"{MEASURE} --sweep sigma=0.1,0.2", "--sigma only applies tdt"),
    ("benchmark_all.py --ray-address a:1", "--ray-address only applies with --executor ray"),
    ("rnnt-bench largest --buckets 3", "--buckets only applies with --model"),
    ("rnnt-bench largest --model icefall --vocab-size 9", "--vocab-size icefall"),
    (f"{MEASURE} --log-dir=", "must not be empty"),
    ("rnnt-bench sweep", "KEY=A,B"),
    ("rnnt-bench sweep --preset quick", "KEY=A,B"),
    ("rnnt-bench list --rounds 3", "unrecognized --rounds"),
    (f"{MEASURE} --vocabsize=500", "did you mean '--vocab-size'?"),
    (f"{MEASURE} --sweep vocb-size=5,6", "did you mean 'vocab-size'?"),
    (f"{MEASURE} --budget 20", "--budget unit"),
    (f"{MEASURE} --budget 1m --sweep vocab-size=9,10", "--budget"),
    ("benchmark_all.py --only k2 --skip k2", "--skip"),
    ("benchmark_all.py --only k2:sideways", "--only k2:modified"),
    (f"{MEASURE} --device cuda:³", "--device cuda:N"),
    (f"{MEASURE} --device cuda:99", "--device cuda:99"),
    (f"{MEASURE} --dtype int8", "--dtype int8 float32"),
    (f"{MEASURE} --preset quik", "--preset quik did you mean quick"),
    (f"{MEASURE} --schedule wait=1", "unrecognized --schedule"),
    (f"{MEASURE} --sweep batch-size=1,99999999999", "batch-size at most 2147483647"),
    (f"{MEASURE} --shape-file {{}}/nowhere.pt", "{}/nowhere.pt no such file"),
    (f"{MEASURE} --shape-file {{}}/nonsense.pt --quiet", "{}/nonsense.pt"),
    (f"{MEASURE} --shape-file {{}}/pipe", "{}/pipe not a file"),
    (f"{MEASURE} --log-dir {{}}/nonsense.pt", "--log-dir {}/nonsense.pt"),
    (f"{MEASURE} --log-dir {{}}/dangling/log", "--log-dir {}/dangling"),
    (f"{MEASURE} --log-dir {{}}/empty --resume", "--resume no run"),
    ("benchmark_all.py --only torchaudo", "torchaudo"),
    ("benchmark_all.py --only {}/benchmark_flush.py", "benchmark_flush.py no such file"),
    ("benchmark_all.py --only {}/benchmark_broken.py", "benchmark_broken.py line 1 not Python"),
    ("benchmark_all.py --only summarize.py", "summarize.py no ADAPTER"),
    ("summarize.py {}/nowhere", "{}/nowhere no such file or folder"),
    ("rnnt-bench report {}/log --output {}/empty", "cannot write {}/empty --output"),
    ("rnnt-bench compare {}/log {}/nowhere", "{}/nowhere no such"),
    ("rnnt-bench shapes --manifest {}/nonsense.jsonl --bpe-vocab-size 9 --output {}/s.pt", "{}/nonsense.jsonl"),
    ("rnnt-bench inference {}/code.yaml", "{}/code.yaml plain data"),
    ("rnnt-bench pipelines --config {}/twice.yaml", "{}/twice.yaml given twice"),
    ("rnnt-bench flops torch.nn:Linear --input-shape 1x2 --args {}/code.yaml", "{}/code.yaml plain data"),
    ("rnnt-bench profile --config {}/list.yaml", "{}/list.yaml"),
    ("rnnt-bench profile --config {}/date.yaml", "{}/date.yaml plain data"),
    ("rnnt-bench profile --config {}/open.yaml", "{}/open.yaml plain data line"),
    ("rnnt-bench check --cases nothing", "nothing ragged"),
    ("rnnt-bench chekc", "chekc did you mean check"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    write_run(folder / "log" / "a")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("line, words", BAD_INPUTS, ids=[line for line, _ in BAD_INPUTS])
def test_it_is_one_clear_line(line, words, folder):
    before = sorted(folder.rglob("*"))
    done = run(*line.format(folder, folder).split(), timeout=60)
    done.stderr = "\n".join(told for told in done.stderr.splitlines() if not told.startswith("measuring "))
    assert_user_error(done, *words.format(folder).split())
    assert sorted(folder.rglob("*")) == before

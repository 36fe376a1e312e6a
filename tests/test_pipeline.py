"""rnnt-bench pipelines: stages, data sets, what adds up, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
import wave

import numpy as np
import pytest
import torch
from rnnt_bench.core.errors import UserError
from rnnt_bench.setup import environments
from rnnt_bench.tools.inference import recognisers
from rnnt_bench.tools.kept import answers, read
from rnnt_bench.tools.pipelines import command as cli
from rnnt_bench.tools.pipelines import datasets, rows

from commands import ROOT, run
from fixtures_model_runs import InProcess, command, costs, write_pipeline

STAGES = """
import time
import torch
from torch import nn

class Sleeper:  # no module
    def __call__(self, source, lengths):
        time.sleep(source.shape[1] / 1000)
        return source

class Double(nn.Module):
    def __init__(self, size=4, wanted=0):
        super().__init__()
        self.layer, self.wanted = nn.Linear(size, size, bias=False), wanted
    def forward(self, rows):
        torch.empty(self.wanted, dtype=torch.uint8).fill_(1)
        return self.layer(rows)

class Sum(nn.Module):
    def forward(self, rows, scale):
        return rows.sum(0) * scale

class Same(nn.Module):
    def forward(self, rows, scale):
        return {"rows": rows, "scale": scale}

def same(source):
    return source

def rows_of(example):
    return torch.ones(2, 4)

def scaled(outputs):
    return {"rows": outputs, "scale": 2.0}

def sealed(outputs):
    return {"rows": Sum()}

class Diverged(nn.Module):
    def forward(self, rows):
        return {"rows": rows, "scores": [rows * float("nan")]}

def make_wrong():
    raise ValueError("no such shape")
"""
TWO = """
general: {made_seconds: [0.1, 0.2], target_sr: 1000}
stage1:
  name: double
  factory: stages.py:Double
  builder: stages.py:rows_of
  converter: stages.py:scaled
stage2: {name: sum, factory: "stages.py:Sum"}
"""


@pytest.fixture
def config(tmp_path):
    """Writes a configuration beside the stages; returns its path."""
    (tmp_path / "stages.py").write_text(STAGES)

    def write(text, name="mine"):
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{name}.yaml"

    return write


def measured(path, *words, code=0, executor=None, log=None):
    """The command in this process; returns the rows of its last run as they are read back."""
    log = log or path.parent / "log"
    flags = ["--config", path, "--log-dir", log, "--device", "cpu", "--quiet", "--threads", 1]
    assert command(cli, *flags, *words, executor=executor) == code
    return [answer.rows for answer in answers([log], "pipeline", rows.answer)][-1] if code == 0 else None


def test_a_cascade_adds_times_and_operations_and_takes_the_largest_memory(tmp_path):
    """Sleeps of 0.2 and 0.4 s; peaks of 100 and 140; medians, so that one slow call is none; two of four failed."""
    jobs = {
        ("one", "a"): costs([0.2, 0.2, 5.0], 100, 400, seconds=2.0),
        ("one", "b"): costs([0.1], 500, 700),
        ("two", "a"): costs([0.4, 0.4, 0.4], 140, 600, seconds=4.0, busy=1),
        ("two", "b"): costs([0.3], 300, 700),
        ("three", "a"): costs([9.0]),
        ("three", "b"): ("error", "ValueError: too short"),
        ("four", "a"): ("oom", "no memory"),
        ("four", "b"): ("unsupported", "the stage before gave nothing"),
    }
    answer = rows.answer(read(write_pipeline(tmp_path, "made", ["a", "b"], jobs)))
    a, b, whole = answer.rows
    assert [row["run_time_s"] for row in (a, whole)] == pytest.approx([0.3, 0.5])
    assert [row["rtf"] for row in (a, whole)] == pytest.approx([0.6 / 6, 1.0 / 6])
    assert (a["memory_bytes"], a["most_memory_bytes"], a["process_bytes"]) == (120, 140, 1200)
    assert (whole["memory_bytes"], whole["flops"], whole["macs"]) == (400, 1200, 600)
    assert [(row["failed"], row["busy"]) for row in answer.rows] == [(1, 1), (1, 1), (2, 1)]
    text = answer.render("table")
    first = text.splitlines()[0]
    assert "beside other load" in first and "memory of the largest stage" in first and rows.ALL in text
    assert text.startswith("run time 0.5000 s") and "2 of 4 examples failed" in text and "three: b: error" in text
    assert "1 example ran beside other load" in text and list(answer.statuses) == ["ok", "ok", "error", "oom"]


def test_every_call_is_counted_and_memory_is_above_the_level_before(config, capsys):
    path = config(TWO.replace("builder", "arguments: {wanted: 200000000}\n  builder"))
    double, total, whole = measured(path, "--repeats", 3, "--warmup", 1)
    assert (double["stage"], total["stage"], double["examples"]) == ("double", "sum", 2)
    assert double["macs"] == 2 * 4 * 4 and double["flops"] == 2 * double["macs"]
    assert total["flops"] == 4 + 4 and total["macs"] == 0  # a sum of two rows, and the scale
    # more than what a process may have free in its heap, which it would take without growing
    assert 195e6 < double["memory_bytes"] < 210e6 and total["memory_bytes"] < 5e6
    assert whole["memory_bytes"] == double["memory_bytes"] < double["process_bytes"]
    assert whole["rtf"] == pytest.approx(2 * whole["run_time_s"] / 0.3)
    assert "largest of a stage" in capsys.readouterr().out
    assert [file.name for file in (path.parent / "log" / "pipeline-mine").iterdir()] == ["tool.jsonl"]


def test_sleeps_are_measured_for_real(config):
    """0.2 and 0.4 s give 0.3; the last stage's Python is named."""
    path = config(
        "general: {made_seconds: [0.2, 0.4], target_sr: 1000, repeats: 2, warmup: 0}\n"
        "stage1: {name: sleep, factory: 'stages.py:Sleeper', converter: 'stages.py:scaled'}\n"
        f"stage2: {{factory: 'stages.py:Sum', python: {environments.interpreter('main')}}}\n"
    )
    flags = ("--device", "cpu", "--threads", 1, "--format", "json", "--log-dir", path.parent / "log")
    done = run("rnnt-bench", "pipelines", "--config", path, *flags)
    assert done.returncode == 0, done.stderr
    sleep, total, _ = json.loads(done.stdout)
    assert sleep["run_time_s"] >= 0.3 and sleep["flops"] == 0 and total["run_time_s"] > 0
    # what counting the operations of one stage imports is in no other's process
    assert abs(sleep["most_process_bytes"] - total["most_process_bytes"]) < 40e6


def test_resuming_measures_what_is_missing(config):
    path, counting = config(TWO, "right"), InProcess()
    measured(path)
    file = path.parent / "log" / "pipeline-right" / "tool.jsonl"
    lines = file.read_text().splitlines()
    cut = [number for number, line in enumerate(lines) if '"status"' in line][1] + 3
    file.write_text("\n".join(lines[:cut]) + "\n")
    assert measured(path, "--resume", executor=counting)[-1]["examples"] == 2
    assert counting.names == ["made-1-0.2s double", "made-1-0.2s sum"]


class Killed(BaseException):
    """The command ends here."""


class EndsAfter(InProcess):
    """Runs so many jobs; the records of the last never come to disk."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def execute(self, *arguments):
        records = super().execute(*arguments)
        if len(self.names) == self.count:
            raise Killed
        return records


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_kill_at_the_end_of_any_stage_costs_that_stage_alone(count, config):
    path = config(TWO.replace("stage2", "stage3") + "stage2: {factory: 'stages.py:Same', builder: 'stages.py:same'}\n")
    with pytest.raises(Killed):
        measured(path, executor=EndsAfter(count))
    resumed = InProcess()
    *_, whole = measured(path, "--resume", executor=resumed)
    assert whole["failed"] == 0 and len(resumed.names) == 7 - count
    assert [file.name for file in (path.parent / "log" / "pipeline-mine").iterdir()] == ["tool.jsonl"]


def test_a_stage_whose_output_is_gone_runs_again_for_the_next(config):
    path, resumed = config(TWO), InProcess()
    with pytest.raises(Killed):
        measured(path, executor=EndsAfter(2))
    (path.parent / "log" / "pipeline-mine" / "0-0.pt").unlink()
    assert measured(path, "--resume", executor=resumed)[-1]["failed"] == 0
    assert resumed.names[:2] == ["made-0-0.1s double", "made-0-0.1s sum"]


def test_resume_begins_anew_where_the_code_of_a_stage_has_changed(config):
    path = config(TWO)
    flags = ["--config", path, "--device", "cpu", "--preset", "quick", "--log-dir", path.parent / "log"]
    assert run("rnnt-bench", "pipelines", *flags, timeout=300).returncode == 0
    (file,) = path.parent.glob("log/*/tool.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: 1 + next(at for at, line in enumerate(lines) if '"status"' in line)]))
    with (path.parent / "stages.py").open("a") as stages:
        stages.write("# faster\n")
    done = run("rnnt-bench", "pipelines", *flags, "--resume", timeout=300)
    assert done.returncode == 0 and "stages.py" in done.stderr and "a run of its own" in done.stderr
    assert len(list(path.parent.glob("log/*/tool.jsonl"))) == 2


@pytest.mark.parametrize(
    ("name", "wrong", "words"), [("Sum", "make_wrong", "make_wrong"), ("scaled", "sealed", "converter")]
)
def test_a_stage_that_fails_or_gives_what_cannot_go_to_the_next_is_named(name, wrong, words, config, capsys):
    measured(config(TWO.replace(f"stages.py:{name}", f"stages.py:{wrong}")), code=2)
    assert words in capsys.readouterr().err


def test_outputs_that_are_nan_are_no_result(config, capsys):
    diverged = TWO.replace("stages.py:Double", "stages.py:Diverged").replace("  converter: stages.py:scaled\n", "")
    measured(config(diverged), code=1)
    printed = capsys.readouterr().out
    assert "double: error: wrong result" in printed and "NaN" in printed and "run time 0" not in printed


def test_a_stage_is_over_general_and_that_over_the_command_line(config):
    text = "general: {repeats: 4, dataset_size: 2, builder: 'x:y'}\nstage1: {factory: 'a:b'}\n"
    path = config(f"{text}stage2: {{factory: 'a:b', repeats: 9}}\n")
    given = rows.configured(path, {"repeats": 7, "warmup": 3, "dataset_size": 5}, {})
    assert [stage.repeats for stage in given.stages] == [4, 9] and given.general.dataset_size == 2
    assert [(stage.warmup, stage.builder) for stage in given.stages] == [(3, "x:y")] * 2
    quick = rows.configured(path, {}, cli.QUICK)
    assert [(stage.repeats, stage.warmup) for stage in quick.stages] == [(1, 0)] * 2 and quick.general.dataset_size == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage1: {factory: 'a:b'}\nstage3: {factory: 'a:b'}\n", ["'stage3'", "gap"]),
        ("stage1: {factory: 'a:b'}\nstage1: {factory: 'a:b'}\n", ["line 2", "stage1"]),
        ("general: {}\n", ["stage1"]),
        ("stage1: {}\n", ["factory"]),
        ("stage1: x\n", ["stage1", "keys and values"]),
        ("stage1: {factory: 'a:b', convertor: 'a:b'}\n", ["convertor", "'converter'"]),
        ("stage1: {factory: 'a:b', python: nosuch}\n", ["stage1.python", "nosuch"]),
        ("stage1: {factory: 'a:b'}\ngenral: {}\n", ["genral", "'general'"]),
        ("stage1: {factory: 'a:b', name: x}\nstage2: {factory: 'a:b', name: x}\n", ["'x'", "name of its own"]),
        ("general: {model_type: 3StageS2ST}\nstage1: {factory: 'a:b'}\n", ["3StageS2ST", "3 stages"]),
        ("general: {model_type: S2Z}\nstage1: {factory: 'a:b'}\n", ["model_type", "S2Z", "S2T", "3StageS2ST"]),
        ("general: {dataset_type: npz}\nstage1: {factory: 'a:b'}\n", ["'npz'", "mean 'npy'", "made, raw, npy, jsonl"]),
        ("general: {dataset_size: 0}\nstage1: {factory: 'a:b'}\n", ["dataset_size", ">= 1"]),
        ("general: {made_seconds: [.nan]}\nstage1: {factory: 'a:b'}\n", [".nan", "line 1", "finite"]),
        ("stage1: {factory: 'a:b', arguments: {x: [-.inf]}}\n", ["-.inf", "line 1", "finite"]),
    ],
)
def test_a_mistake_is_named(config, text, words):
    with pytest.raises(UserError) as raised:
        rows.configured(config(text), {}, {})
    assert "\n" not in str(raised.value) and "mine.yaml" in str(raised.value)
    assert all(word in str(raised.value) for word in words), str(raised.value)


SHIPPED = sorted((ROOT / "examples" / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_configurations_run(path, tmp_path):
    *_, whole = measured(path, "--made-seconds", "0.1", "--preset", "quick", log=tmp_path)
    assert whole["flops"] > 0 and whole["run_time_s"] > 0 and whole["rtf"] > 0 and not whole["not_counted"]
    assert {rows.configured(path, {}, {}).general.model_type for path in SHIPPED} == set(rows.MODEL_TYPES)


@pytest.fixture
def manifest(tmp_path):
    """Two files below audio/, one of them stereo at 8 kHz, and a link that leads out of it."""
    (tmp_path / "audio").mkdir()
    for name, samples, rate, channels in (("a", [1000] * 16000, 16000, 1), ("b", [1000, 3000] * 4000, 8000, 2)):
        with wave.open(str(tmp_path / "audio" / f"{name}.wav"), "wb") as file:
            file.setparams((channels, 2, rate, 0, "NONE", ""))
            file.writeframes(b"".join(value.to_bytes(2, "little", signed=True) for value in samples))
    (tmp_path / "audio" / "link").symlink_to("/etc")

    def of(text, **more):
        (tmp_path / "test.tsv").write_text(text.format(root=tmp_path / "audio"))
        return datasets.examples(rows.General(dataset_type="raw", dataset_path=str(tmp_path / "test.tsv"), **more))

    return of


def test_what_reads_audio_is_not_in_the_memory_of_the_stage(manifest):
    (path,) = manifest("{root}\na.wav\t16000\n").values()
    code = "import sys; from pathlib import Path; from rnnt_bench.tools.inference import recognisers; "
    code += "wave = recognisers.read(Path(sys.argv[1]), 8000); "
    code += "print(len(wave), {'soundfile', 'torchaudio'} & {*sys.modules})"
    line = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout == "8000 set()\n"


def test_a_manifest_is_read_in_one_channel_at_the_asked_rate(manifest):
    text = "{root}\na.wav\t16000\nb.wav\t4000\n"
    a, b = (recognisers.read(path, 16000) for path in manifest(text).values())
    assert (len(a), len(b)) == (16000, 8000) and abs(float(b[2000:6000].mean()) * 32768 - 2000) < 10
    assert list(manifest(text, dataset_size=1)) == ["a.wav"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "no folder"]),
        ("{root}\n", ["no examples"]),
        ("{root}\nlink/hosts\t1\n", ["line 2", "below"]),
        ("{root}\nnosuch.wav\t1\n", ["line 2", "no such file"]),
        ("{root}\na.wav\t1\na.wav\t1\n", ["a.wav", "differ"]),
    ],
)
def test_a_manifest_that_is_wrong(manifest, text, words):
    with pytest.raises(UserError) as raised:
        manifest(text)
    assert all(word in str(raised.value) for word in words)


TEXTS = {"a": [4, 5, 2], "b": [6, 2]}
MT = ROOT / "examples" / "pipelines" / "mt.yaml"


@pytest.fixture
def texts(tmp_path):
    """Writes TEXTS in each form; returns the path."""

    def of(kind):
        path = tmp_path / kind
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"id": id, "tokens": ids}) + "\n\n" for id, ids in TEXTS.items()))
            return path
        make = {"numpy": np.array, "tensors": torch.tensor, "lists": list}[kind]
        inputs = [{"src_tokens": make([ids]), "src_lengths": make([len(ids)])} for ids in TEXTS.values()]
        examples = [{"id": id, "net_input": each} for id, each in zip(TEXTS, inputs)]
        np.save(tmp_path / f"{kind}.npy", examples, allow_pickle=True)
        return tmp_path / f"{kind}.npy"

    return of


@pytest.mark.parametrize("kind", ["jsonl", "numpy", "tensors", "lists"])
def test_a_stage_takes_the_tokens_of_a_text(kind, texts, tmp_path, config):
    text = "stage1: {name: look, factory: 'stages.py:Looked'}\n"
    path, type_ = config(text), "jsonl" if kind == "jsonl" else "npy"
    (path.parent / "stages.py").write_text(
        "import torch\nclass Looked(torch.nn.Module):\n    def forward(self, tokens, lengths):\n"
        "        assert tokens.tolist() in [[[4, 5, 2]], [[6, 2]]] and lengths.tolist() == [tokens.shape[1]]\n"
        "        return torch.ones(4, 4) @ torch.ones(4, tokens.shape[1])\n"
    )
    flags = ("--dataset-type", type_, "--dataset-path", texts(kind))
    (row,) = measured(path, *flags, "--repeats", 1)
    assert row["examples"] == 2 and row["rtf"] is None and row["macs"] == 4 * 4 * (3 + 2) / 2
    if kind == "jsonl":
        (translation,) = measured(MT, *flags, "--preset", "quick", log=tmp_path / "mt")
        assert translation["examples"] == 1 and translation["macs"] > 1000


class Runs:
    """Write a file as its pickle is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", '{"id": "a", "tokens": [1]}\n{"id": "b"}\n', ["line 2", "tokens"]),
        ("x.jsonl", '{"id": "a", "tokens": ["b"]}\n', ["line 1", "int"]),
        ("x.jsonl", '{"id": "a", "tokens": []}\n', ["line 1", "no tokens"]),
        ("x.jsonl", "\n", ["no examples"]),
        ("x.jsonl", '{"id": "a", "tokens": [1]}\n' * 2, ["a", "differ"]),
        ("x.npy", "text", ["x.npy", "numpy.save"]),
        ("x.npy", lambda path: [1, 2], ["int64"]),
        ("x.npy", lambda path: [{"id": 1}], ["example 1", "net_input"]),
        ("x.npy", lambda path: [{"id": 1, "net_input": Runs(path / "made")}], ["open", "no plain data"]),
        ("x.npy", lambda path: [{"id": 1, "net_input": torch.nn.Linear(1, 1)}], ["no plain data"]),
    ],
)
def test_a_data_set_of_text_that_is_wrong_is_named_and_runs_nothing(name, content, words, tmp_path):
    if callable(content):
        np.save(tmp_path / name, content(tmp_path), allow_pickle=True)
    else:
        (tmp_path / name).write_text(content)
    kind = name.partition(".")[2]
    with pytest.raises(UserError) as raised:
        datasets.examples(rows.General(dataset_type=kind, dataset_path=str(tmp_path / name)))
    assert all(word in str(raised.value) for word in words), raised.value
    assert not (tmp_path / "made").exists()


def test_a_stage_of_fairseq_names_what_it_needs(texts, config, capsys):
    stage = ROOT / "examples" / "pipelines" / "fairseq_stage.py"
    path = config(f"stage1: {{factory: '{stage}:Generation', arguments: {{path: x.pt}}}}\n")
    measured(path, "--dataset-type", "jsonl", "--dataset-path", texts("jsonl"), code=2)
    assert "fairseq==0.12.2" in capsys.readouterr().err

"""pipeline_metrics.py: stages, data sets, what adds up, and the command as a user runs it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import wave
from types import SimpleNamespace

import numpy
import pytest
import torch
from commands import ROOT, SHARED, assert_user_error, run
from fixtures_model_runs import InProcess, write_pipeline

from common.core.errors import NotRunnable, UserError
from common.core.guard import guarded
from common.jobs.local import Local
from common.setup import environments
from common.tools import examples
from common.tools.dataset import Dataset
from common.tools.inference import counters as perf
from common.tools.inference import fairseq_stage, small
from common.tools.inference import pipeline_command as cli
from common.tools.inference import pipeline_measure as pipeline
from common.tools.inference import pipeline_rows as analysis
from common.tools.inference import pipeline_table as tables
from common.tools.inference.pipeline_plot import figures
from common.tools.inference.pipeline_rows import Costs, cascade
from common.tools.inference.pipeline_section import sections

pytestmark = pytest.mark.usefixtures("as_before")
LIBRISPEECH = SHARED / "librispeech"

STAGES = """
import time
import torch
from torch import nn


class Sleeper:
    \"\"\"Sleeps for each example as long as it is told; no module.\"\"\"

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, source, lengths):
        time.sleep(self.seconds * source.shape[1] / 1000)
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
        return {"waveform": rows.sum(0) * scale, "sample_rate": 8000}


def rows_of(example):
    return torch.ones(2, 4)


def scaled(outputs):
    return {"rows": outputs, "scale": 2.0}


def wrong(rows):
    raise ValueError("no such shape")


def make_wrong():
    return wrong
"""


@pytest.fixture
def config(tmp_path):
    """Writes a configuration beside the stages; returns its path."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "stages.py").write_text(STAGES)

    def write(text, name="mine"):
        path = folder / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


TWO = """
general: {made_seconds: [0.1, 0.2], target_sr: 1000}
stage1:
  name: double
  factory: stages.py:Double
  builder: stages.py:rows_of
  converter: stages.py:scaled
stage2: {name: sum, factory: "stages.py:Sum"}
"""


def measured(path, log, *words, code=0, executor=None):
    flags = cli.parser().parse_args(
        ["--config", str(path), "--log-dir", str(log), *"--device cpu --quiet --threads 1".split(), *map(str, words)]
    )
    assert guarded("x", lambda: cli.main(flags, executor or InProcess())) == code
    return analysis.find([log])[-1] if code != 2 else None


# -- what adds up ----------------------------------------------------------------------------------------------------


def test_a_cascade_adds_times_and_operations_and_takes_the_largest_memory():
    whole = cascade([Costs("a", 0.3, 120, 140, flops=500), Costs("b", 0.2, 200, 200, flops=700)])
    assert (whole.run_time_s, whole.memory_bytes, whole.flops) == (0.5, 200, 1200)
    assert cascade([Costs("a", 0.3), Costs("b")]).run_time_s is None


def test_the_numbers_of_examples(tmp_path):
    """Sleeps of 0.2 and 0.4 s; peaks of 100 and 140; medians, so that one slow call is none."""
    of = {"one": {"s": ([0.2, 0.2, 5.0], 100, 400)}, "two": {"s": ([0.4, 0.4, 0.4], 140, 600)}}
    (measured_run,) = analysis.find([write_pipeline(tmp_path, "made", ["s"], of)])
    assert measured_run.whole.run_time_s == pytest.approx(0.3)
    assert (measured_run.whole.memory_bytes, measured_run.whole.most_memory_bytes) == (120, 140)
    assert (measured_run.whole.process_bytes, measured_run.whole.most_process_bytes) == (1200, 1400)
    assert (measured_run.whole.flops, measured_run.whole.macs) == (500, 250)


def test_sleeps_are_measured(config, tmp_path):
    """0.2 and 0.4 s give 0.3, for real."""
    path = config(
        "general: {made_seconds: [0.2, 0.4], target_sr: 1000}\n"
        "stage1: {name: sleep, factory: 'stages.py:Sleeper', arguments: {seconds: 1.0}}\n"
    )
    measured_run = measured(path, tmp_path / "log", "--repeats", 2, "--warmup", 0)
    assert 0.3 <= measured_run.whole.run_time_s < 0.45 and measured_run.whole.flops == 0


def test_every_call_is_counted_and_memory_is_above_the_level_before(config, tmp_path, capsys):
    path = config(
        TWO.replace("factory: stages.py:Double", "factory: stages.py:Double\n  arguments: {wanted: 200000000}")
    )
    measured_run = measured(path, tmp_path / "log", "--repeats", 3, "--warmup", 1)
    assert [stage.name for stage in measured_run.stages] == ["double", "sum"] and measured_run.statuses == ["ok", "ok"]
    double, total = measured_run.stages
    assert double.macs == 2 * 4 * 4 and double.flops == 2 * double.macs
    assert total.flops == 4 + 4 and total.macs == 0  # a sum of two rows, and the scale
    # More than what a process may have free in its heap, which it would take without growing.
    assert 195e6 < double.memory_bytes < 210e6 and total.memory_bytes < 5e6
    assert measured_run.whole.memory_bytes == double.memory_bytes < double.process_bytes
    assert measured_run.whole.flops == double.flops + total.flops
    printed = capsys.readouterr().out
    assert "double" in printed and "all" in printed and "largest of a stage" in printed
    folder = tmp_path / "log" / "pipeline-mine"
    rows = list(csv.DictReader((folder / "stages.csv").open()))
    assert [row["stage"] for row in rows] == ["double", "sum", "all"] and float(rows[0]["macs"]) == 32
    names = {file.name for file in folder.iterdir()}
    assert names >= {"pipeline.jsonl", "stages.md", "stages.json", "pipeline.html"}


def test_a_stage_that_fails_is_named_and_the_others_are_kept(config, tmp_path, capsys):
    path = config(TWO.replace("stages.py:Sum", "stages.py:make_wrong").replace("  converter: stages.py:scaled\n", ""))
    measured_run = measured(path, tmp_path / "log", code=1)
    assert measured_run.statuses == ["error", "error"] and "sum: no such shape" in measured_run.examples[0].reason


def test_a_stage_whose_examples_failed_is_marked(tmp_path):
    """One of three examples ended in the second stage, and one ran beside other load."""
    numbers = {"a": ([0.1], 100, 400), "b": ([0.2], 100, 400)}
    file = write_pipeline(tmp_path, "made", ["a", "b"], {name: numbers for name in ("one", "two", "three")})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if not (line.get("job") == "two" and line.get("stage") == "b")]
    for line in lines:
        if (line.get("job"), line["record"]) == ("two", "status"):
            line.update(status="error", reason="ValueError: too short")
        if (line.get("job"), line["record"]) == ("three", "call"):
            line.update(flags=["busy"])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (measured_run,) = analysis.find([tmp_path])
    rows = tables.stages([measured_run]).values()
    assert [row["status"] for row in rows] == ["", "1 failed", "1 failed"]
    text = tables.render(measured_run, "table")
    assert "2 of 3" in text and "1 of 3 examples failed" in text and "1 example ran beside other load" in text
    kept = json.loads(tables.render(measured_run, "json"))
    assert [(row["failed"], row["of"], row["busy"]) for row in kept] == [(0, 3, 1), (1, 3, 1), (1, 3, 1)]


def test_nothing_is_marked_where_all_is_well(tmp_path):
    (measured_run,) = analysis.find([write_pipeline(tmp_path, "made", ["s"], {"one": {"s": ([0.2], 100, 400)}})])
    assert "status" not in tables.stages([measured_run]).values()[0] and "load" not in tables.render(
        measured_run, "table"
    )


# -- environments ----------------------------------------------------------------------------------------------------

OTHER = TWO.replace('"stages.py:Sum"', '"stages.py:Sum", environment: main')


@pytest.mark.skipif(not environments.interpreter("main"), reason=environments.reason("main"))
def test_stages_of_other_environments_are_processes_of_theirs(config, tmp_path):
    flags = ("--device", "cpu", "--threads", 1, "--repeats", 1, "--warmup", 0, "--format", "json")
    both = []
    for name, text in (("apart", OTHER), ("together", TWO)):
        done = run("pipeline_metrics.py", "--config", config(text, name), *flags, "--log-dir", tmp_path / "log")
        assert done.returncode == 0, done.stderr
        both.append(json.loads(done.stdout))
    apart, together = both
    assert [row["flops"] for row in apart] == [row["flops"] for row in together] and apart[-1]["flops"] > 0
    (measured_run,) = (each for each in analysis.find([tmp_path / "log"]) if each.name == "apart")
    assert measured_run.statuses == ["ok", "ok"] and measured_run.environment.torch in measured_run.torches


def test_what_cannot_go_to_another_environment_is_named(config, tmp_path):
    text = OTHER.replace("stages.py:scaled", "stages.py:sealed")
    path = config(text)
    (path.parent / "stages.py").write_text(STAGES + "\n\ndef sealed(outputs):\n    return {'rows': Sum()}\n")
    flags = ("--device", "cpu", "--quiet", "--log-dir", tmp_path / "log")
    assert_user_error(run("pipeline_metrics.py", "--config", path, *flags), "double", "converter")


def test_an_environment_that_is_not_there(config, tmp_path, monkeypatch, capsys):
    path = config(TWO.replace('"stages.py:Sum"', '"stages.py:Sum", environment: silero'))
    monkeypatch.setattr(environments, "interpreter", lambda name: None)
    measured(path, tmp_path / "log", code=2, executor=Local())
    assert "make setup ENVIRONMENTS=silero" in capsys.readouterr().err
    config(TWO.replace('"stages.py:Sum"', '"stages.py:Sum", environment: fairsek'))
    measured(path, tmp_path / "log", code=2)
    assert "'fairseq'" in capsys.readouterr().err


#: A checkpoint of fairseq's own Transformer with random weights, as its training would leave it.
CHECKPOINT = """
import sys
from pathlib import Path

import torch
from fairseq import options, tasks

folder = Path(sys.argv[1])
for language in ("de", "en"):
    (folder / f"dict.{language}.txt").write_text("".join(f"w{number} 1\\n" for number in range(40)))
words = [str(folder), "--arch", "transformer", "--source-lang", "de", "--target-lang", "en"]
for side in ("encoder", "decoder"):
    for name, size in (("embed-dim", 16), ("ffn-embed-dim", 32), ("layers", 1), ("attention-heads", 2)):
        words += [f"--{side}-{name}", str(size)]
given = options.parse_args_and_arch(options.get_training_parser("translation"), words)
torch.manual_seed(0)
model = tasks.setup_task(given).build_model(given)
history = [{"num_updates": 0, "best_loss": 0.0, "optimizer_name": "", "criterion_name": "CrossEntropyCriterion"}]
saved = {"args": given, "model": model.state_dict(), "extra_state": {}, "optimizer_history": history}
torch.save({**saved, "last_optimizer_state": None}, folder / "model.pt")
"""


@pytest.mark.skipif(not environments.interpreter("fairseq"), reason=environments.reason("fairseq"))
def test_a_model_of_fairseq_in_its_environment(config, tmp_path):
    """The real package: a Transformer that translates with its beam search, then a stage of the main environment."""
    folder = tmp_path / "model"
    folder.mkdir()
    made = [str(environments.interpreter("fairseq")), "-c", CHECKPOINT, str(folder)]
    subprocess.run(made, check=True, capture_output=True)
    numpy.savez(tmp_path / "x.npz", id=["a"], src_tokens=[[5, 6, 7, 2]], src_lengths=[4])
    path = config(
        f"general: {{dataset_type: npy, dataset_path: {tmp_path / 'x.npz'}, repeats: 1, warmup: 0}}\n"
        "stage1: {name: MT, factory: 'common.tools.inference.fairseq_stage:Generation', environment: fairseq, "
        "converter: 'common.tools.inference.fairseq_stage:best', "
        f"arguments: {{path: {folder / 'model.pt'}, data: {folder}, trust_pickle: true}}}}\n"
        "stage2: {name: length, factory: 'stages.py:Length'}\n"
    )
    (path.parent / "stages.py").write_text(
        STAGES + "\n\nclass Length(Sum):\n    def forward(self, tokens, length):\n"
        "        assert tokens.shape[1] == int(length) > 0\n"
    )
    flags = ("--device", "cpu", "--threads", 1, "--format", "json", "--log-dir", tmp_path / "log")
    done = run("pipeline_metrics.py", "--config", path, *flags)
    assert done.returncode == 0, done.stderr
    translation, *_ = json.loads(done.stdout)
    assert translation["stage"] == "MT" and translation["macs"] > 1000 and translation["run_time_s"] > 0


def test_resuming_measures_what_is_missing(config, tmp_path):
    path = config(TWO)
    measured(path, tmp_path / "log")
    file = tmp_path / "log" / "pipeline-mine" / "pipeline.jsonl"
    lines = file.read_text().splitlines()
    cut = next(number for number, line in enumerate(lines) if '"status"' in line) + 3
    file.write_text("\n".join(lines[:cut]) + "\n")
    counting = InProcess()
    measured_run = measured(path, tmp_path / "log", "--resume", executor=counting)
    assert counting.names == ["made-1-0.2s"] and measured_run.statuses == ["ok", "ok"] and measured_run.path == file


def test_pipelines_stand_beside_each_other_in_the_report(tmp_path):
    write_pipeline(tmp_path, "direct", ["S2S"], {"one": {"S2S": ([0.2], 100, 400)}})
    of = {"ASR": ([0.1], 100, 400), "MT": ([0.2], 100, 400)}
    write_pipeline(tmp_path, "cascade", ["ASR", "MT"], {"one": of}, started="2026-11-22T11:00:00+00:00")
    (section,) = sections([tmp_path])
    (table,) = section.tables
    assert [row[1].shown for row in table.rows] == ["ASR", "MT", "all", "S2S"]
    time, _ = figures(analysis.find([tmp_path]))
    assert [trace["x"] for trace in time.data] == [[0.1, 0.2], [0.2]] and time.layout["barmode"] == "stack"
    done = run("rnnt-bench", "report", tmp_path, "--output", tmp_path / "report.html")
    assert done.returncode == 0 and 'id="pipelines"' in (tmp_path / "report.html").read_text()


def test_waveforms_are_written(config, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    measured(
        config(TWO),
        tmp_path / "log",
        "--dump-speech-waveforms-dir",
        tmp_path / "waves",
        "--dump-waveform-file-prefix",
        "x-",
    )
    files = sorted((tmp_path / "waves").iterdir())
    assert [file.name for file in files] == ["x-made-0-0.1s.wav", "x-made-1-0.2s.wav"]
    assert soundfile.info(str(files[0])).samplerate == 8000


def test_instructions_have_a_column_where_they_were_counted(tmp_path):
    of = {"one": {"a": ([0.1], 1, 400), "b": ([0.1], 1, 500)}, "two": {"a": ([0.1], 1, 600), "b": ([0.1], 1, 500)}}
    (measured_run,) = analysis.find([write_pipeline(tmp_path, "made", ["a", "b"], of)])
    rows = tables.stages([measured_run]).values()
    assert [row["instructions (perf)"] for row in rows] == [10_000, 10_000, 20_000]
    for stage in measured_run.stages:
        stage.instructions = None
    assert "instructions (perf)" not in tables.stages([measured_run]).values()[0]


def test_instructions_where_perf_is_allowed():
    count = perf.instructions(lambda: sum(range(100_000)))
    assert count is None or count > 100_000


# -- the configuration -----------------------------------------------------------------------------------------------


def test_a_stage_is_over_general_and_that_over_the_command_line(config):
    path = config(
        "general: {repeats: 4, dataset_size: 2}\nstage1: {factory: 'a:b'}\nstage2: {factory: 'a:b', repeats: 9}\n"
    )
    configuration = cli.configured(path, {"repeats": 7, "warmup": 3, "dataset_size": 5})
    assert [stage.repeats for stage in configuration.stages] == [4, 9]
    assert [stage.warmup for stage in configuration.stages] == [3, 3] and configuration.general.dataset_size == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage1: {factory: 'a:b'}\nstage3: {factory: 'a:b'}\n", ["stage2 is missing", "stage3"]),
        (
            "stage1: {factory: 'a:b'}\nstage2: {factory: 'a:b'}\nstage2: {factory: 'a:b'}\n",
            ["line 3", "stage2", "twice"],
        ),
        ("general: {}\n", ["stage1"]),
        ("stage1: {}\n", ["factory"]),
        ("stage1: {factory: 'a:b', convertor: 'a:b'}\n", ["convertor", "'converter'"]),
        ("stage1: {factory: 'a:b'}\ngenral: {}\n", ["genral", "'general'"]),
        ("stage1: {factory: 'a:b', repeats: many}\n", ["repeats", "'many'"]),
        ("stage1: {factory: 'a:b', name: x}\nstage2: {factory: 'a:b', name: x}\n", ["'x'", "name of its own"]),
        ("general: {model_type: 3StageS2ST}\nstage1: {factory: 'a:b'}\n", ["3StageS2ST", "3 stages"]),
        ("general: {model_type: S2Z}\nstage1: {factory: 'a:b'}\n", ["S2Z", "S2UT"]),
        ("general: {dataset_size: 0}\nstage1: {factory: 'a:b'}\n", ["dataset_size", "at least 1"]),
        ("general: {dataset_type: wav}\nstage1: {factory: 'a:b'}\n", ["dataset_type", "raw"]),
    ],
)
def test_a_mistake_is_named(config, text, words):
    path = config(text)
    with pytest.raises(UserError) as raised:
        cli.configured(path, {})
    assert "\n" not in str(raised.value) and "mine.yaml" in str(raised.value) or "dataset_size" in words
    for word in words:
        assert word in str(raised.value)


SHIPPED = [ROOT / "pipeline.yaml", *sorted((ROOT / "examples" / "pipelines").glob("*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_configurations_run(path, tmp_path):
    measured_run = measured(path, tmp_path, "--made-seconds", "0.1", "--repeats", 1, "--warmup", 0)
    assert measured_run.statuses == ["ok"] and measured_run.whole.flops > 0 and measured_run.whole.run_time_s > 0
    assert not measured_run.whole.not_counted


def test_every_classic_type_is_shipped():
    types = {cli.configured(path, {}).general.model_type for path in SHIPPED}
    assert types == set(cli.MODEL_TYPES)


def test_a_vocoder_gives_1280_samples_for_a_unit():
    wave = small.Vocoder()(torch.zeros(1, 10, dtype=torch.long))
    assert wave["waveform"].shape[0] == 1 and abs(wave["waveform"].shape[1] - 12800) < 64


# -- data sets -------------------------------------------------------------------------------------------------------


def write_wave(path, samples, rate=16000, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(b"".join(int(value).to_bytes(2, "little", signed=True) for value in samples))


def dataset(**given):
    return Dataset(**{"made_seconds": cli.Whole().made_seconds, **given})


@pytest.fixture
def manifest(tmp_path):
    """Three files below audio/, one of them stereo at 8 kHz."""
    write_wave(tmp_path / "audio" / "a.wav", [1000] * 16000)
    write_wave(tmp_path / "audio" / "b" / "b.wav", [1000, 3000] * 4000, 8000, 2)
    write_wave(tmp_path / "audio" / "c.wav", [1000] * 24000)
    path = tmp_path / "test.tsv"
    path.write_text(f"{tmp_path / 'audio'}\na.wav\t16000\nb/b.wav\t4000\nc.wav\t24000\n")
    return path


def test_a_manifest_is_read_in_one_channel_at_the_asked_rate(manifest):
    entries = examples.entries(dataset(dataset_type="raw", dataset_path=str(manifest)))
    read = [entry.read() for entry in entries]
    assert [entry.id for entry in entries] == ["a.wav", "b/b.wav", "c.wav"]
    assert [sample["src_tokens"].shape for sample in read] == [(1, 16000), (1, 8000), (1, 24000)]
    assert abs(float(read[1]["src_tokens"][0, 2000:6000].mean()) * 32768 - 2000) < 10
    assert len(examples.entries(dataset(dataset_type="raw", dataset_path=str(manifest), dataset_size=2))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "no folder"]),
        ("{root}\n", ["no examples"]),
        ("{root}/nosuch\na.wav\t1\n", ["line 1", "nosuch"]),
        ("{root}\n../secret.wav\t1\n", ["line 2", "below"]),
        ("{root}\n/etc/passwd\t1\n", ["line 2", "below"]),
        ("{root}\nlink/hosts\t1\n", ["line 2", "below"]),
        ("{root}\nnosuch.wav\t1\n", ["line 2", "no such file"]),
    ],
)
def test_a_manifest_that_is_wrong(manifest, text, words):
    root = manifest.parent / "audio"
    (root / "link").symlink_to("/etc")
    manifest.write_text(text.format(root=root))
    with pytest.raises(UserError) as raised:
        examples.entries(dataset(dataset_type="raw", dataset_path=str(manifest)))
    for word in words:
        assert word in str(raised.value)


def test_audio_without_samples_is_an_error(manifest):
    write_wave(manifest.parent / "audio" / "a.wav", [])
    (entry, *_) = examples.entries(dataset(dataset_type="raw", dataset_path=str(manifest)))
    with pytest.raises(UserError, match="no samples"):
        entry.read()


def test_arrays_are_read_without_pickle(tmp_path):
    path = tmp_path / "x.npz"
    tokens = numpy.arange(12, dtype=numpy.float32).reshape(2, 6)
    numpy.savez(path, id=numpy.array(["one", "two"]), src_tokens=tokens, src_lengths=numpy.array([6, 4]))
    first, two = (entry.read() for entry in examples.entries(dataset(dataset_type="npy", dataset_path=str(path))))
    assert (first["id"], two["id"]) == ("one", "two") and two["src_tokens"].tolist() == [[6, 7, 8, 9]]
    assert two["src_lengths"].tolist() == [4]
    numpy.savez(path, id=numpy.array([], dtype=str), src_tokens=tokens[:0], src_lengths=numpy.array([], dtype=int))
    with pytest.raises(UserError, match="x.npz: has no examples"):
        examples.entries(dataset(dataset_type="npy", dataset_path=str(path)))
    numpy.savez(path, id=numpy.array(["one"]), src_tokens=tokens)
    with pytest.raises(UserError, match="src_lengths"):
        examples.entries(dataset(dataset_type="npy", dataset_path=str(path)))
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot read .*x.npz"):
        examples.entries(dataset(dataset_type="npy", dataset_path=str(path)))


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_examples_need_trust(tmp_path):
    path, harm = tmp_path / "x.npy", tmp_path / "harmed"
    numpy.save(path, numpy.array([Harm(harm)], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="--trust-pickle"):
        examples.entries(dataset(dataset_type="npy", dataset_path=str(path)))
    assert not harm.exists()
    given = [{"id": 7, "net_input": {"src_tokens": torch.ones(1, 5), "src_lengths": torch.tensor([5])}}]
    numpy.save(path, numpy.array(given, dtype=object), allow_pickle=True)
    (entry,) = examples.entries(dataset(dataset_type="npy", dataset_path=str(path), trust_pickle=True))
    assert entry.id == "7" and entry.read()["src_tokens"].shape == (1, 5)


@pytest.mark.parametrize("size", [0, -1])
def test_no_example_is_a_clear_error(size, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parser().parse_args(["--dataset-size", str(size)])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "--dataset-size" in line and "at least 1" in line


def test_subsets(manifest, tmp_path):
    assert examples.subset([5, 1, 4, 2], "short", 2, 0) == [1, 3]
    assert examples.subset([5, 1, 4, 2], "long", 2, 0) == [0, 2]
    assert len(set(examples.subset(range(100), "random", 10, 0))) == 10
    done = run(
        "pipeline_metrics.py",
        "--dataset-type",
        "raw",
        "--dataset-path",
        manifest,
        "--write-subsets",
        tmp_path / "sub",
        "--subset-size",
        2,
    )
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert [re.sub(r".*/", "", file) for file in files] == ["random.tsv", "short.tsv", "long.tsv"]
    short = examples.entries(dataset(dataset_type="raw", dataset_path=files[1]))
    assert [entry.id for entry in short] == ["a.wav", "b/b.wav"]


def test_subsets_of_arrays(tmp_path):
    tokens = numpy.zeros((3, 6), numpy.float32)
    path = tmp_path / "x.npz"
    numpy.savez(path, id=numpy.array(["a", "b", "c"]), src_tokens=tokens, src_lengths=numpy.array([6, 2, 4]))
    written = examples.write_subsets(dataset(dataset_type="npy", dataset_path=str(path)), tmp_path / "sub", 1)
    names = [
        [entry.id for entry in examples.entries(dataset(dataset_type="npy", dataset_path=str(file)))]
        for file in written
    ]
    assert names[1:] == [["b"], ["a"]] and len(names[0]) == 1


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not LIBRISPEECH.is_dir(), reason="no ../shared/data/librispeech")
def test_real_audio_through_a_cascade(config, tmp_path):
    """Runs an example in a process of its own."""
    sizes = "dim: 16, heads: 2, layers: 1"
    path = config(
        f"general: {{dataset_size: 1, repeats: 1, warmup: 0}}\n"
        f"stage1: {{name: ASR, factory: 'common.tools.inference.small:Generator', arguments: {{{sizes}, ratio: 0.1}}, "
        "converter: 'common.tools.inference.small:with_lengths'}\n"
        f"stage2: {{name: TTS, factory: 'common.tools.inference.small:TextToSpeech', arguments: {{{sizes}}}}}\n"
    )
    names = sorted(path.name for path in LIBRISPEECH.glob("*.flac"))
    manifest = tmp_path / "real.tsv"
    manifest.write_text("\n".join([str(LIBRISPEECH), *names]) + "\n")
    flags = ("--dataset-type", "raw", "--dataset-path", manifest, "--device", "cpu", "--threads", 1)
    done = run("pipeline_metrics.py", "--config", path, *flags, "--log-dir", tmp_path / "log", "--format", "json")
    assert done.returncode == 0, done.stderr
    *stages, whole = json.loads(done.stdout)
    assert [stage["stage"] for stage in stages] == ["ASR", "TTS"]
    assert whole["run_time_s"] == pytest.approx(sum(stage["run_time_s"] for stage in stages))
    assert whole["memory_bytes"] == max(stage["memory_bytes"] for stage in stages) > 0


def test_the_script_ends_in_one_line(tmp_path):
    done = run("pipeline_metrics.py", "--help")
    assert done.returncode == 0 and "--trust-pickle" in done.stdout
    assert_user_error(run("pipeline_metrics.py", "--config", tmp_path / "nosuch.yaml"), "nosuch.yaml")


def test_an_example_and_its_operations():
    call = pipeline.StageCall(torch.nn.Linear(4, 3, bias=False), (torch.ones(2, 4),), "layer")
    operations = pipeline.operations(call)
    assert (operations.macs, operations.flops, operations.stage) == (24, 48, "layer")


def test_a_model_of_fairseq_is_called_as_its_benchmark_does(tmp_path, monkeypatch):
    """A stand-in for the package shows what is missing, what needs trust, and what is handed on."""
    with pytest.raises(NotRunnable, match="fairseq is not installed") as raised:
        monkeypatch.setitem(sys.modules, "fairseq.checkpoint_utils", None)
        fairseq_stage.Generation("x.pt")
    assert raised.value.status == "missing"
    seen = {}

    class Task:
        def build_generator(self, models, config):
            return config

        def inference_step(self, generator, models, sample, prefix_tokens, constraints):
            tokens = models[0](sample["net_input"]["src_tokens"].float())
            return [[{"tokens": tokens[0].int()}]]

    torch.save({"args": argparse.Namespace(arch="transformer")}, tmp_path / "x.pt")

    def load(paths, arg_overrides):
        seen.update(paths=paths, given=arg_overrides, state=torch.load(paths[0], map_location="cpu"))
        return [torch.nn.Identity()], SimpleNamespace(generation="beam"), Task()

    monkeypatch.setitem(sys.modules, "fairseq", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fairseq.checkpoint_utils", SimpleNamespace(load_model_ensemble_and_task=load))
    with pytest.raises(UserError, match="trust_pickle"):
        fairseq_stage.Generation("x.pt")
    path = str(tmp_path / "x.pt")
    model = fairseq_stage.Generation(path, data="bin", trust_pickle=True, max_len=3)
    tokens, length = fairseq_stage.best(model(torch.tensor([[4, 5, 6]]), torch.tensor([3])))
    assert tokens.tolist() == [[4, 5, 6]] and length.tolist() == [3]
    assert (seen["paths"], seen["given"]) == ([path], {"data": "bin", "max_len": 3})
    assert seen["state"]["args"].arch == "transformer" and fairseq_stage.TRUSTING not in os.environ

"""profile_inference.py: the configuration, audio, the grid, the numbers of a cell, and the command as users run it."""

from __future__ import annotations

import csv
import json
import math
import random
import subprocess
import sys
import wave
from pathlib import Path

import pytest
import torch
from commands import ROOT, SHARED, assert_user_error, run
from fixtures_model_runs import InProcess, write_inference
from fixtures_traces import kineto, memory, span, write
from torchaudio.functional import edit_distance

from common.core import settings
from common.core.errors import NotRunnable, UserError
from common.core.guard import guarded
from common.jobs.local import Local
from common.jobs.spec import Task
from common.measure import profiler
from common.setup import environments
from common.tools import audio, configuration
from common.tools import outputs as outputs_of
from common.tools.inference import command as cli
from common.tools.inference import grid, model_types, recognisers
from common.tools.inference import measure as inference
from common.tools.inference import rows as analysis
from common.tools.inference import table as tables
from common.tools.inference.plot import figures
from common.tools.inference.section import sections
from common.traces import spans

pytestmark = pytest.mark.usefixtures("as_before")
MIB = 2**20
LIBRISPEECH = SHARED / "librispeech"
REAL = LIBRISPEECH / "1089-134686-0001.flac"
PLAIN = {key: [value] for key, value in grid.VARIANTS.items()}

MODELS = '''
import time
import torch
from torch import nn

from common.tools.inference.recognisers import Recogniser


class Tiny(nn.Module):
    """A strided convolution and a layer: (N, samples) -> (N, frames, 4)."""

    sample_rate = 8000

    def __init__(self, wanted=0, seconds=0.0, limit=10**9):
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 8, 80, 40), nn.Linear(8, 4)
        self.seconds, self.limit = seconds, limit

    def forward(self, waves):
        if waves.numel() > self.limit:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate much")
        if self.seconds and len(waves) > 1:
            time.sleep(self.seconds)
        return self.out(torch.relu(self.conv(waves[:, None])).transpose(1, 2))


class Streaming(Recogniser):
    """Four pieces, 20 ms each."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces

    def forward(self, waves, lengths):
        return [waves.sum(1), self.pieces]

    def stream(self, waves, lengths):
        for piece in self.pieces:
            time.sleep(0.02)
            yield piece
'''


def write_wave(path, samples, rate=16000, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(b"".join(int(value).to_bytes(2, "little", signed=True) for value in samples))
    return path


# -- audio -----------------------------------------------------------------------------------------------------------


def test_audio_is_looped_in_time_to_exactly_the_asked_duration(tmp_path):
    samples = [number % 1000 for number in range(33088)]  # 2.068 s
    path = write_wave(tmp_path / "a.wav", samples)
    batch = audio.batch(path, 32, 4, 16000, seed=0)
    assert batch.shape == (4, 512000)
    assert torch.equal(batch[0, :33088], batch[3, 33088 : 2 * 33088])
    assert torch.equal(batch[0, -15680:], batch[0, :15680])  # 512,000 = 15 x 33,088 + 15,680
    assert audio.batch(path, 1.5, 2, 16000, seed=0).shape == (2, 24000)


def test_audio_is_resampled_and_of_one_channel(tmp_path):
    path = write_wave(tmp_path / "a.wav", [1000, 3000] * 8000, rate=8000, channels=2)
    wave = audio.read(path, 16000)
    assert len(wave) == 16000 and abs(float(wave[4000:12000].mean()) * 32768 - 2000) < 10


def test_noise_is_of_the_seed():
    assert torch.equal(audio.batch(None, 0.5, 2, 16000, 1), audio.batch(None, 0.5, 2, 16000, 1))
    assert audio.batch(None, 0.5, 2, 16000, 1).shape == (2, 8000)


def test_audio_that_is_none_is_one_line(tmp_path):
    (tmp_path / "text.wav").write_text("no audio")
    with pytest.raises(UserError, match="text.wav"):
        audio.read(tmp_path / "text.wav", 16000)


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data/librispeech")
def test_real_audio():
    batch = audio.batch(REAL, 32, 2, 16000, 0)
    assert batch.shape == (2, 512000) and 0.005 < float(batch.std()) < 0.5
    assert audio.batch(REAL, 2.5, 1, 8000, 0).shape == (1, 20000)


# -- the grid --------------------------------------------------------------------------------------------------------


def test_a_triangle_skips_exactly_the_heavy_corner():
    axes = {
        grid.SECONDS: [1, 2, 5, 8, 32],
        grid.BATCH: [1, 4, 8],
        **{key: [value] for key, value in grid.VARIANTS.items()},
    }
    skipped = [(each.seconds, each.size) for each in grid.positions(axes) if grid.is_skipped(each, axes)]
    assert sorted(skipped) == [(5, 8), (8, 4), (8, 8), (32, 4), (32, 8)]
    for is_triangle, cells in ((True, 10), (False, 15)):
        dimensions = cli.Dimensions(triangle_only=is_triangle)
        config = cli.Profile(pretrained_model=cli.Model(source="a:b"), profiling_dimensions=dimensions)
        assert len(cli.planned(config, axes)) == cells


def test_jobs_are_named_by_their_values():
    axes = {**PLAIN, grid.SECONDS: [0.5], grid.BATCH: [4], "threads": [2], "dtype": ["bfloat16"]}
    (position,) = grid.positions(axes)
    assert position.job == "0.5s-x4-threads-2-bfloat16" and not position.variant.is_plain


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_the_classic_real_time_factor():
    """172,400 us of self time over the last two batches of 4 x 5 s."""
    assert analysis.factor(analysis.self_time_rtf(172_400, 2, 4, 5)) == "4.31E-03"


def test_streams_are_batches_that_end_in_time():
    assert analysis.streams(0.5, 4, 5) == 40
    assert analysis.streams(3.0, 4, 5) == 4
    assert analysis.streams(6.0, 4, 5) == 0


def test_memory_reads_as_before():
    position = grid.Position(grid.Variant(), 1, 1)
    cell = analysis.GridCell(position, cpu_peak_bytes=0, cuda_peak_bytes=round(1.47 * 2**30))
    assert tables.memory(cell) == "0.00 + 1.47 Gb"
    assert tables.memory(analysis.GridCell(position, cpu_peak_bytes=round(1.47 * 2**30))) == "1.47 Gb"


def test_a_gpu_has_peaks_and_self_time_of_its_own(tmp_path):
    """From the records to columns, grids and JSON."""
    peaks = {"device_allocated_bytes": 3 * MIB, "device_reserved_bytes": 4 * MIB, "device_used_bytes": 500 * MIB}
    times = {"cpu_us": 20_000.0, "cuda_us": 160_000.0, "cpu_peak_bytes": 0, "cuda_peak_bytes": round(1.47 * 2**30)}
    write_inference(tmp_path, peaks=peaks, profiled=times)
    (measured_run,) = analysis.find([tmp_path])
    row = tables.cells(measured_run).values()[1]  # two batches of 4 x 1 s
    assert (row["device MB"], row["device used MB"]) == (3, 500) and "process MB" not in row
    _, profiled, memory = ([cell.shown for cell in table.rows[0]] for table in tables.grids(measured_run))
    assert profiled[2] == "2.50E-03 + 2.00E-02" and memory[2] == "0.00 + 1.47 Gb"
    kept = json.loads(tables.render(measured_run, "json"))[1]
    assert (kept["profiled_cpu_rtf"], kept["profiled_cuda_rtf"]) == (0.0025, 0.02)
    assert kept["device_reserved_bytes"] == 4 * MIB and kept["process_bytes"] is None


def test_a_running_sum_of_allocations_peaks_at_five(tmp_path):
    """+2, +3, -3, +1, within labels that lie in each other."""
    changes, total = [2, 3, -3, 1], 100  # the counter does not begin at zero
    events = [span("ProfilerStep#1", 1000, 100), span("outer", 1010, 80), span("inner", 1012, 70), memory(990, total)]
    for number, change in enumerate(changes):
        total += change
        events.append(memory(1015 + 5 * number, total, change))
    path = write(tmp_path / "x.pt.trace.json", kineto(events))
    assert [spread.highest for spread in spans.read(path) if not spread.name] == [5]
    assert spans.read(path, device_type=1) == []


class Labelled:
    """A step with one tensor of 1 MiB inside two labels."""

    def run(self, after_forward=lambda: None):
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
            torch.empty(MIB, dtype=torch.uint8)
        after_forward()


def test_a_tensor_inside_two_labels_counts_once(tmp_path):
    options = {"schedule": inference.SCHEDULE, "record_shapes": False, "with_stack": False, "profile_memory": True}
    resolved = settings.Settings.from_json({**settings.resolve({}, "cpu").to_json(), **options})
    steps = [Labelled() for _ in range(resolved.trace_steps)]
    times = []
    profiler.profile(
        iter(steps),
        resolved,
        torch.device("cpu"),
        tmp_path,
        "x",
        on_cycle=lambda profiled: times.append(profiler.self_times(profiled)),
    )
    assert len(steps) == 6
    (path,) = tmp_path.glob("*.pt.trace.json")
    steps = [spread.highest for spread in spans.read(path) if not spread.name]
    assert len(steps) == 2 and max(steps) == MIB
    ((cpu, cuda),) = times
    assert cpu > 0 and cuda == 0


# -- outputs of a variant --------------------------------------------------------------------------------------------


def test_differences_of_outputs():
    plain = (torch.tensor([3.0, 4.0]), [[1, 2, 3, 4]])
    assert inference.difference(plain, plain) == 0
    assert inference.difference(plain, (torch.tensor([3.0, 4.5]), [[9]])) == pytest.approx(0.1)
    assert inference.difference([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.25
    assert inference.difference([[1, 2]], [[1, 2, 3, 4]]) == 0.5
    assert inference.difference([[1, 2, 3, 4]], [[9, 1, 2, 3, 4]]) == 0.2  # one more does not move the others
    assert inference.difference(["kitten"], ["sitting"]) == 3 / 7 and inference.difference([], []) == 0
    assert inference.difference(torch.ones(2), torch.tensor([1.0, float("nan")])) == float("inf")
    assert inference.difference(torch.ones(2), torch.ones(3)) == float("inf")


def test_integer_tensors_are_sequences_of_symbols():
    """A model that returns the best symbol of each frame: 1 of 800 frames changed is 0.125%, however they are kept."""
    plain = torch.arange(800)[None]
    changed = plain.clone()
    changed[0, 100] = -1
    assert inference.difference(plain, changed) == 1 / 800
    assert inference.difference(plain.numpy(), changed.numpy()) == 1 / 800
    assert inference.difference({"tokens": plain}, {"tokens": torch.cat([plain[:, :1], plain], 1)}) == 1 / 801
    assert inference.difference(plain, plain[:, :0]) == 1


def test_edits_are_those_of_levenshtein():
    generator = random.Random(0)
    for _ in range(20):
        first, second = ([generator.randrange(4) for _ in range(generator.randrange(30))] for _ in range(2))
        assert outputs_of.edits(first, second) == edit_distance(first, second), (first, second)


def test_very_long_sequences_are_compared_place_by_place():
    first = torch.zeros(2, 10 * outputs_of.MOST_EDITED, dtype=torch.uint8)
    second = first.clone()
    second[1, :5] = 1
    assert outputs_of.edits(*(tensor.flatten().tolist() for tensor in (first, second))) == 5


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "gets"),
    [
        ("waves", False),
        ("waves, lengths", True),
        ("waves, sizes", True),
        ("waves, lengths=None", True),
        ("waves, mask=None, x_lens=None", True),
        ("waves, *, input_lengths=None", True),
        ("waves, wav_lens=None", False),  # shares of the longest, as SpeechBrain has them
        ("waves, max_length=10", False),
        ("waves, **options", False),
    ],
)
def test_a_module_gets_lengths_where_it_takes_some(signature, gets):
    scope = {}
    exec(f"def forward(self, {signature}): return {{k: v for k, v in locals().items() if k != 'self'}}", scope)
    module = type("Takes", (torch.nn.Module,), {"forward": scope["forward"]})()
    arguments = recognisers.Plain(module)(torch.zeros(2, 30), torch.tensor([30, 30]))
    lengths = [value for name, value in arguments.items() if name != "waves" and isinstance(value, torch.Tensor)]
    assert [tensor.tolist() for tensor in lengths] == ([[30, 30]] if gets else [])


def loaded(source, **arguments):
    torch.manual_seed(0)
    return recognisers.load({"type": "factory", "source": source, "arguments": arguments}, torch.device("cpu"))


def outputs(model, seconds, size):
    waves = audio.batch(None, seconds, size, model.sample_rate, 0)
    with torch.no_grad():
        return model(waves, torch.full((size,), waves.shape[1]))


def test_the_conformer_transducer_decodes_every_utterance():
    model = loaded(
        "common.tools.inference.recognisers:ConformerRNNT",
        layers=1,
        dim=32,
        feed_forward=32,
        encoding_dim=16,
        vocab_size=12,
    )
    encoded, symbols = outputs(model, 1.2, 3)
    assert encoded.shape == (3, 15, 16) and len(symbols) == 3  # 121 frames in eights
    assert symbols[0] == symbols[1] == symbols[2]  # equal rows
    assert len(model.parts()) == 1


def test_the_emformer_streams_what_it_gives():
    model = loaded("common.tools.inference.recognisers:EmformerRNNT", layers=1, dim=32, vocab_size=12, blank_bias=2.0)
    waves = audio.batch(None, 0.4, 2, 16000, 0)
    lengths = torch.full((2,), waves.shape[1])
    with torch.no_grad():
        pieces = list(model.stream(waves, lengths))
        whole = model(waves, lengths)
    assert len(pieces) == 2 * 3 and whole == [pieces[2], pieces[5]]  # 41 frames in sixteens
    call = inference.ModelCall(inference.Calls(model, waves, torch.device("cpu")))
    marks = []
    with torch.no_grad():
        call.run(lambda: marks.append("first"))
    assert marks == ["first"] and call.streamed is any(pieces)


@pytest.mark.parametrize(
    ("type_", "source", "words"),
    [
        ("transformers", "facebook/wav2vec2-base-960h", "transformers"),
        ("torchaudio", "WAV2VEC2_ASR_BASE_960H", "weights"),
        ("factory", "common.tools.inference.recognisers:SileroVad", "silero_vad"),
        ("EncoderASR", "/no/such/folder", "folder"),
    ],
)
def test_what_is_missing_says_so(type_, source, words, tmp_path, monkeypatch):
    if type_ == "factory" and not cli.interpreters.lacks("silero_vad"):
        pytest.skip("silero-vad is installed here")
    if type_ == "EncoderASR":
        pytest.importorskip("speechbrain")
    monkeypatch.setattr(recognisers.os, "environ", dict(recognisers.os.environ))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(NotRunnable, match=words) as raised:
        recognisers.load({"type": type_, "source": source}, torch.device("cpu"))
    assert raised.value.status == "missing" and "\n" not in str(raised.value)


def test_an_unknown_bundle_is_a_mistake():
    with pytest.raises(UserError, match="WAV2VEC2_ASR_BASE_960H"):
        recognisers.load({"type": "torchaudio", "source": "WAV2VEC9"}, torch.device("cpu"))


def test_the_types_of_the_command_are_those_that_can_be_loaded():
    assert list(recognisers.MAKERS) == list(model_types.TYPES)


def test_a_model_of_speechbrain_from_a_folder(tmp_path):
    pytest.importorskip("speechbrain")
    (tmp_path / "hyperparams.yaml").write_text(
        "sample_rate: 8000\nmodules:\n"
        "    enhance_model: !new:torch.nn.GRU\n        input_size: 160\n        hidden_size: 160\n"
        "pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer\n"
    )
    model = recognisers.load({"type": "WaveformEnhancement", "source": str(tmp_path)}, torch.device("cpu"))
    assert model.sample_rate == 8000 and outputs(model, 0.02, 3).shape == (3, 160)
    with pytest.raises(NotRunnable, match="--compile"):
        model.parts()


# -- the configuration -----------------------------------------------------------------------------------------------


def config_file(folder, **parts):
    """parts: pretrained_model and profiling_dimensions."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.py").write_text(MODELS)
    model = {"type": "factory", "source": f"{folder / 'models.py'}:Tiny"}
    dimensions = {grid.SECONDS: [0.1, 0.2], grid.BATCH: [1, 2], "triangle_only": False}
    document = {
        "pretrained_model": {**model, **parts.get("pretrained_model", {})},
        "profiling_dimensions": {**dimensions, **parts.get("profiling_dimensions", {})},
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(document))
    return path


def configured(path, *overrides):
    return cli.configured(path, overrides)


def test_values_of_the_command_line_are_over_those_of_the_file(tmp_path):
    path = config_file(tmp_path)
    words = ["--profiling_dimensions.batch_sizes=[1,2,3]", "--example_audio=null", "--audio_mockup_secs=[0.5, 2]"]
    dimensions = configured(path, *words).profiling_dimensions
    assert dimensions.batch_sizes == [1, 2, 3] and dimensions.audio_mockup_secs == [0.5, 2]
    assert dimensions.export_logs is False


def test_an_override_may_have_spaces():
    given = ["--batch_sizes=[1, 2]", "--threads=1", "--example_audio= null"]
    flags, overrides = cli.parsed(given)
    assert (flags.config, flags.threads) == (cli.DEFAULT, (1,)) and set(overrides) == {given[0], given[2]}
    assert cli.configured(flags.config, overrides).profiling_dimensions.batch_sizes == [1, 2]


def test_a_file_beside_the_configuration_is_found(tmp_path):
    write_wave(tmp_path / "a.wav", [1] * 100)
    path = config_file(
        tmp_path, profiling_dimensions={"example_audio": "a.wav"}, pretrained_model={"source": "models.py:Tiny"}
    )
    config = configured(path)
    assert config.profiling_dimensions.example_audio == str(tmp_path / "a.wav")
    assert config.pretrained_model.source == f"{tmp_path / 'models.py'}:Tiny"


@pytest.mark.parametrize(
    ("parts", "overrides", "words"),
    [
        ({}, ["--profiling_dimensions.batch_size=[1]"], ["batch_size", "batch_sizes"]),
        ({}, ["--batch_sizes=[1,many]"], ["batch_sizes", "'many'", "whole number"]),
        ({}, ["--batch_sizes=[1,1]"], ["batch_sizes", "1 is given twice"]),
        ({}, ["--audio_mockup_secs=[0]"], ["audio_mockup_secs", "above 0"]),
        ({}, ["--audio_mockup_secs=[.nan]"], ["audio_mockup_secs", "above 0"]),
        ({}, ["--audio_mockup_secs=1"], ["audio_mockup_secs", "list"]),
        ({}, ["--triangle_only=maybe"], ["triangle_only", "true or false"]),
        ({}, ["--example_audio=nosuch.wav"], ["nosuch.wav", "no such file", "null"]),
        ({}, ["--threds", "2"], ["--threds", "key=value"]),
        ({}, ["--batch_sizes=[1"], ["--batch_sizes", "YAML"]),
        ({"pretrained_model": {"type": "EncoderDecoder"}}, [], ["EncoderDecoderASR"]),
        ({"pretrained_model": {"sourc": "x"}}, [], ["'sourc'", "'source'"]),
        ({"pretrained_model": {"source": None}}, [], ["source"]),
        ({"pretrained_model": {"arguments": [1]}}, [], ["arguments", "keys and values"]),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_key(tmp_path, parts, overrides, words):
    path = config_file(tmp_path, **parts)
    with pytest.raises(UserError) as raised:
        configured(path, *overrides)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3", "'a'", "twice", "line 1"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["plain data"]),
        ("a: [1\n", ["YAML"]),
        ("- 1\n", ["keys and values"]),
        ("profiling: {}\n", ["'profiling'", "profiling_dimensions"]),
        ("a: &x [*x]\n", []),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        configured(tmp_path / "x.yaml")
    assert "x.yaml" in str(raised.value) and "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_yaml_that_repeats_a_key_deep_inside_is_refused():
    with pytest.raises(UserError, match="line 3.*'b'"):
        configuration.parsed("a:\n  - b: 1\n    b: 2\n", "x")
    assert configuration.parsed("a: {b: 1}\nc: {b: 2}\n", "x") == {"a": {"b": 1}, "c": {"b": 2}}


@pytest.mark.parametrize(
    "path", [ROOT / "profile.yaml", *sorted((ROOT / "examples").glob("*.yaml"))], ids=lambda path: path.name
)
def test_the_shipped_configurations_are_right(path):
    config = configured(path)
    source = config.pretrained_model.source
    assert config.pretrained_model.type == "factory" and hasattr(recognisers, source.rpartition(":")[2])


# -- the command -----------------------------------------------------------------------------------------------------


def measured(path, log, *words, code=0, executor=None):
    """The command in this process; returns what it printed, and its run as it is read back."""
    given = [
        "--log-dir",
        str(log),
        *"--device cpu --quiet --threads 1 --max-seconds 0.05 --max-samples 6".split(),
        *words,
    ]
    flags, overrides = cli.parsed([str(path), *given])
    assert guarded("x", lambda: cli.main(flags, overrides, executor or InProcess())) == code
    (latest,) = analysis.find([log]) if code != 2 else (None,)
    return latest


def test_the_command_measures_every_cell(tmp_path, capsys):
    path = config_file(tmp_path / "config")
    grid_run = measured(path, tmp_path / "log", "--threads", "1")
    printed = capsys.readouterr().out
    assert [(cell.seconds, cell.size) for cell in grid_run.cells] == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    for cell in grid_run.cells:
        assert cell.status == "ok" and cell.n >= 1
        assert cell.p50_s <= cell.p90_s <= cell.p99_s
        assert cell.rtf == pytest.approx(cell.p50_s / (cell.size * cell.seconds))
        assert cell.utterances_per_second == pytest.approx(cell.size / cell.p50_s)
        assert cell.streams == cell.size * int(cell.seconds / cell.p90_s)
        assert cell.profiled_cpu_rtf > 0 and cell.profiled_cuda_rtf is None
        assert cell.first_token_s is None and cell.output_error is None
        assert cell.process_peak_bytes > cell.process_bytes >= 0
    # (N, 8, frames) of the convolution and its ReLU, at least, are there at once
    assert grid_run.cells[3].cpu_peak_bytes >= 2 * 2 * 8 * 39 * 4 > 0
    assert grid_run.cells[3].cpu_peak_bytes > grid_run.cells[0].cpu_peak_bytes
    assert "Real-time factor" in printed and "0.0000 Gb" in printed and "noise" in printed
    folder = tmp_path / "log" / "inference-tiny"
    names = {file.name for file in folder.iterdir()}
    assert names >= {"inference.jsonl", "real_time_factors.md", "memory_peaks.md", "cells.csv", "cells.json"}
    assert "traces" not in names
    rows = list(csv.DictReader((folder / "cells.csv").open()))
    assert [row["batch_sizes"] for row in rows] == ["1", "2", "1", "2"] and float(rows[0]["rtf"]) == grid_run.cells[
        0
    ].rtf
    assert json.loads((folder / "cells.json").read_text())[2]["audio_mockup_secs"] == 0.2
    assert (tmp_path / "log" / "report.html").exists() and "inference.html" in names
    assert "| audio | 1 | 2 |" in (folder / "real_time_factors.md").read_text()


@pytest.mark.parametrize("pieces", [[None, [], [7], [7, 8]], [None, [], [], []]])
def test_the_first_token_is_the_first_piece_that_says_something(pieces, tmp_path, capsys):
    """The third piece; and a model that never says anything has no such time."""
    source = f"{tmp_path / 'config' / 'models.py'}:Streaming"
    parts = {"pretrained_model": {"source": source, "arguments": {"pieces": pieces}}}
    path = config_file(tmp_path / "config", profiling_dimensions={grid.SECONDS: [0.1], grid.BATCH: [2]}, **parts)
    measured_run = measured(path, tmp_path / "log")
    (cell,), (shown,) = measured_run.cells, tables.cells(measured_run).values()
    assert cell.status == "ok" and cell.p50_s >= 0.08
    if any(pieces):
        assert 0.06 <= cell.first_token_s < cell.p50_s
        assert shown["first token ms"] == 1e3 * cell.first_token_s
    else:
        assert cell.first_token_s is None and "first token ms" not in shown


def test_a_cell_that_fails_is_a_cell(tmp_path, capsys):
    """Out of memory, and the cell after it is measured; then with --resume: what is there is not measured again."""
    parts = {"pretrained_model": {"arguments": {"limit": 2000}}, "profiling_dimensions": {grid.BATCH: [2, 1]}}
    path = config_file(tmp_path / "config", **parts)
    measured_run = measured(path, tmp_path / "log", code=1)
    assert [cell.status for cell in measured_run.cells] == ["ok", "ok", "oom", "ok"]
    assert "allocate memory" in measured_run.cells[2].reason and "oom" in capsys.readouterr().out
    counting = InProcess()
    again = measured(path, tmp_path / "log", "--resume", code=1, executor=counting)
    assert counting.names == ["0.2s-x2-threads-1"] and again.path == measured_run.path
    with pytest.raises(UserError, match="--resume"):
        flags, _ = cli.parser().parse_known_args(
            [str(path), "--log-dir", str(tmp_path / "log"), "--resume", "--seed", "3"]
        )
        cli.main(flags, [], InProcess())


def test_skipped_cells_read_so(tmp_path, capsys):
    given = {grid.SECONDS: [0.1, 0.2, 0.3], grid.BATCH: [1, 2, 3], "triangle_only": True}
    measured_run = measured(config_file(tmp_path / "config", profiling_dimensions=given), tmp_path / "log")
    assert [cell.status for cell in measured_run.cells].count("skipped") == 3
    table = tables.grids(measured_run)[0]
    assert [cell.shown for cell in table.rows[2][2:]] == ["skipped", "skipped"]
    figure = figures(measured_run)[0]
    assert "not measured" in [trace["name"] for trace in figure.data]


def test_variants_are_checked_first(tmp_path, capsys):
    path = config_file(tmp_path / "config", profiling_dimensions={grid.SECONDS: [0.1], grid.BATCH: [1]})
    measured_run = measured(
        path, tmp_path / "log", "--dtype", "float32,bfloat16", "--quantize", "none,dynamic", "--threads", "1,2"
    )
    assert len(measured_run.variants()) == 8
    errors = {cell.position.job: cell.output_error for cell in measured_run.cells}
    assert errors["0.1s-x1-threads-1"] is None
    assert 0 < errors["0.1s-x1-threads-2-bfloat16"] < 0.05
    assert 0 < errors["0.1s-x1-threads-1-quantize-dynamic"] < 0.25
    both = [
        cell
        for cell in measured_run.cells
        if (cell.position.variant.quantize, cell.position.variant.dtype) == ("dynamic", "bfloat16")
    ]
    assert [cell.status for cell in both] == ["unsupported", "unsupported"]
    assert "threads 2, bfloat16" in capsys.readouterr().out


def test_a_variant_that_is_wrong_is_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(inference.TOLERANCES, "bfloat16", 1e-9)
    path = config_file(tmp_path / "config", profiling_dimensions={grid.SECONDS: [0.1], grid.BATCH: [1]})
    (cell,) = measured(path, tmp_path / "log", "--dtype", "bfloat16", code=1).cells
    assert cell.status == "error" and "off by" in cell.reason and cell.rtf is None and cell.output_error > 0


def twice(graph, inputs):
    """A backend whose code gives twice what it should."""
    return lambda *given: [2 * value for value in graph(*given)]


def broken(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch 2.0 or newer compiles")
@pytest.mark.parametrize(
    ("backend", "status", "words"),
    [("aot_eager", "ok", ""), (twice, "error", "off by 1 of"), (broken, "error", "no compiler here")],
)
def test_a_model_that_is_compiled_is_checked_first(backend, status, words, tmp_path, monkeypatch, capsys):
    """By backends that make no machine code, which takes a minute."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend=backend))
    path = config_file(tmp_path / "config", profiling_dimensions={grid.SECONDS: [0.1], grid.BATCH: [1]})
    code = 0 if status == "ok" else 1
    plain, cell = measured(path, tmp_path / "log", "--compile", "false,true", code=code).cells
    assert (plain.status, cell.status) == ("ok", status) and words in cell.reason
    assert cell.position.variant.compile and plain.output_error is None
    if status == "ok":
        assert 0 <= cell.output_error <= inference.TOLERANCES["compile"] and cell.rtf > 0
    else:
        assert cell.output_error == (1 if backend is twice else None) and cell.rtf is None


def test_traces_are_kept_on_request_and_are_no_runs_of_losses(tmp_path, capsys):
    given = {grid.SECONDS: [0.1], grid.BATCH: [1], "export_logs": True}
    measured(config_file(tmp_path / "config", profiling_dimensions=given), tmp_path / "log")
    traces = list((tmp_path / "log" / "inference-tiny" / "traces" / "0.1s-x1-threads-1").glob("*.pt.trace.json*"))
    assert len(traces) == 1
    done = run("summarize.py", tmp_path / "log", "--format", "json")
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and row["rtf"] > 0 and row["status"] == "ok"


def test_the_report_has_a_section(tmp_path):
    write_inference(tmp_path / "log")
    (section,) = sections([tmp_path / "log"])
    assert [figure.key for figure in section.figures] == ["rtf", "inference-memory"]
    assert len(section.content) == 4
    (tmp_path / "log" / "other").mkdir()
    (tmp_path / "log" / "other" / "inference.jsonl").write_text("nonsense\n")
    broken = sections([tmp_path / "log"])[1]
    printed = run("summarize.py", tmp_path / "log").stdout
    assert "line 1" in printed and "1.01E-01" in printed
    assert "inference.jsonl" in str(broken.failures) and not broken.figures
    done = run("rnnt-bench", "report", tmp_path / "log", "--output", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert 'id="inference-0"' in (tmp_path / "report.html").read_text()


def test_a_run_for_real(tmp_path):
    """Each cell in a process of its own: one that hangs is ended, and the one after it is measured."""
    parts = {"pretrained_model": {"arguments": {"seconds": 600}}}
    path = config_file(tmp_path / "config", profiling_dimensions={grid.SECONDS: [0.1], grid.BATCH: [2, 1]}, **parts)
    flags = ("--log-dir", tmp_path / "log", "--device", "cpu", "--threads", 1, "--max-seconds", 0.1, "--format", "json")
    done = run("profile_inference.py", path, *flags, "--timeout", 15)
    late, cell = json.loads(done.stdout)
    assert done.returncode == 1 and cell["status"] == "ok" and cell["rtf"] > 0, done.stderr
    assert late["status"] == "timeout" and late["rtf"] is None and "--timeout" in late["reason"]


@pytest.mark.thorough
def test_the_whole_process_holds_its_libraries(tmp_path):
    """A cell is a fork of a process that has torch loaded; it reads what a process of its own would."""
    config = {
        "pretrained_model": {"type": "factory", "source": "torch.nn:Identity"},
        "profiling_dimensions": {"example_audio": None, "export_logs": False},
    }
    cell = {**grid.VARIANTS, grid.SECONDS: 1, grid.BATCH: 1}
    task = Task("1s", "inference", {"config": config, "cell": cell})
    given = settings.resolve({"max_seconds": 0.1, "max_samples": 1, "allocator": "system"}, "cpu")
    forked = Local().execute(task, Path(sys.executable), tmp_path, given, math.inf, lambda text: None)
    job = {**task.to_json(given, tmp_path), "output": str(tmp_path / "records.jsonl")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    code = "import sys; from common.jobs.worker import main; sys.exit(main(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "job.json")], cwd=ROOT, check=True, capture_output=True)
    alone = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    expected, measured = (
        [record["process_peak_bytes"] for record in records if record["record"] == "call_memory"]
        for records in (alone, forked)
    )
    assert measured == pytest.approx(expected, rel=0.05) and measured[0] > 300e6


def test_the_script_ends_in_one_line(tmp_path):
    done = run("profile_inference.py", "--help")
    assert done.returncode == 0 and "audio_mockup_secs" in done.stdout
    assert_user_error(run("profile_inference.py", tmp_path / "nosuch.yaml"), "nosuch.yaml")
    missing = {"type": "transformers", "source": "facebook/wav2vec2-base-960h"}
    if cli.interpreters.lacks("transformers"):
        path = config_file(tmp_path, pretrained_model=missing)
        done = run("profile_inference.py", path, "--log-dir", tmp_path / "log", "--quiet", "--device", "cpu")
        assert_user_error(done, "transformers", "not installed")
        assert not list((tmp_path / "log").glob("*/inference.jsonl"))


@pytest.mark.skipif(not environments.interpreter("silero"), reason=environments.reason("silero"))
def test_the_profile_of_silero_in_its_environment(tmp_path):
    """The shipped configuration, small, by the real command."""
    small = ("--audio_mockup_secs=[0.5]", "--batch_sizes=[2]")
    flags = ("--log-dir", tmp_path, "--device", "cpu", "--threads", 1, "--max-seconds", 0.1, "--format", "json")
    done = run("profile_inference.py", ROOT / "examples" / "silero_vad.yaml", *small, *flags)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)  # of a probability for each 32 ms the first is there before the last
    assert cell["status"] == "ok" and cell["rtf"] > 0 and 0 < cell["first_token_s"] < cell["p50_s"]


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data/librispeech")
def test_a_real_model_hears_speech():
    pytest.importorskip("silero_vad", reason="no silero-vad: make setup ENVIRONMENTS=silero")
    model = loaded("common.tools.inference.recognisers:SileroVad")
    waves = audio.batch(REAL, 2, 2, 16000, 0)
    with torch.no_grad():
        speech = model(waves, torch.full((2,), 32000))
        silence = model(torch.zeros(1, 32000), torch.full((1,), 32000))
    assert speech.shape == (2, 63) and speech.mean() > 0.5 > silence.max()

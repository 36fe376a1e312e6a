"""rnnt-bench inference: audio, models, the grid, the numbers of a cell, and the command; then pretrained models by the
real packages, from folders of random weights: SpeechBrain, Hugging Face, torchaudio, each where it is installed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import runpy

import pytest
import torch
from rnnt_bench.core.errors import UserError
from rnnt_bench.records.schema import as_written
from rnnt_bench.tools.inference import command as cli
from rnnt_bench.tools.inference import outputs as outputs_of_a_model
from rnnt_bench.tools.inference import recognisers, rows
from rnnt_bench.tools.kept import Job, answers, read, slice_of

from commands import ROOT, SHARED, assert_user_error, run
from fixtures_model_runs import InProcess, cell, command, write_inference

REAL = SHARED / "librispeech" / "1089-134686-0001.flac"
SHIPPED = ROOT / "examples" / "recognisers.py"

MODELS = """
import time
import torch
from torch import nn

class Tiny(nn.Module):
    sample_rate = 8000
    def __init__(self, seconds=0.0, limit=10**9, first=0.0):
        super().__init__()
        self.conv, self.out = nn.Conv1d(1, 8, 80, 40), nn.Linear(8, 4)
        self.seconds, self.limit, self.first = seconds, limit, first
    def forward(self, waves):
        if waves.numel() > self.limit:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        if self.seconds and len(waves) > 1:
            time.sleep(self.seconds)
        time.sleep(self.first)
        self.first = 0.0
        return self.out(torch.relu(self.conv(waves[:, None])).transpose(1, 2))

class Wrong(Tiny):
    # off by `error` of its outputs, or NaN, once it runs in `dtype`
    def __init__(self, dtype, error):
        super().__init__()
        self.dtype, self.wrong = getattr(torch, dtype), float(error)
    def forward(self, waves):
        outputs = super().forward(waves)
        return outputs * (1 + self.wrong) if outputs.dtype == self.dtype else outputs

class Warming(nn.Module):
    # slow in its first calls
    def __init__(self, calls):
        super().__init__()
        self.calls = calls
    def forward(self, waves):
        self.calls -= 1
        if self.calls > 0:
            time.sleep(0.2)
        return waves.cumsum(1)

class Silent(Tiny):
    def forward(self, waves):
        super().forward(waves)

class Streaming(nn.Module):
    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces
    def forward(self, waves, lengths):
        return [waves.sum(1), self.pieces]
    def stream(self, waves, lengths):
        for piece in self.pieces:
            time.sleep(0.02)
            yield piece
"""


@pytest.fixture
def config(tmp_path):
    """Writes a configuration of a model of MODELS, 0.1 and 0.2 s by batches of 1 and 2; returns its path."""
    (tmp_path / "models.py").write_text(MODELS)

    def write(model=(), **dimensions):
        grid_ = {"audio_mockup_secs": [0.1, 0.2], "batch_sizes": [1, 2], "triangle_only": False, **dimensions}
        of = {"source": "models.py:Tiny", **dict(model)}
        (tmp_path / "tiny.yaml").write_text(json.dumps({"pretrained_model": of, "profiling_dimensions": grid_}))
        return tmp_path / "tiny.yaml"

    return write


ONE = {"audio_mockup_secs": [0.1], "batch_sizes": [1]}


def made(kind, source, **arguments):
    return recognisers.load(rows.Model(source=str(source), type=kind, arguments=arguments), torch.device("cpu"))


@torch.no_grad()
def outputs(model, seconds=0.5, size=2, call=None):
    waves = recognisers.batch(None, seconds, size, model.sample_rate, 0)
    return (call or model.call)(waves, torch.full((size,), waves.shape[1]))


SAME = "--quiet --threads 1 --max-seconds 0.05 --max-samples 6".split()


def measured(path, *words, code=0, executor=None):
    """The command in this process; returns the rows of its run as they are read back."""
    log = path.parent / "log"
    quick = ["--device", "cpu", *SAME]
    assert command(cli, path, "--log-dir", log, *quick, *words, executor=executor) == code
    return [row for answer in answers([log], "inference", rows.answer) for row in answer.rows]


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data/librispeech")
def test_audio_is_resampled_and_looped_to_exactly_the_asked_duration():
    samples = len(recognisers.read(REAL, 16000))
    batch = recognisers.batch(str(REAL), 32, 4, 16000, seed=0)
    assert batch.shape == (4, 512000) and torch.equal(batch[3, samples : 2 * samples], batch[0, :samples])
    assert recognisers.batch(str(REAL), 2.5, 1, 8000, 0).shape == (1, 20000)


def test_noise_is_of_the_seed_and_audio_that_is_none_is_one_line(tmp_path):
    batch = recognisers.batch(None, 0.5, 2, 16000, 1)
    assert batch.shape == (2, 8000) and torch.equal(batch, recognisers.batch(None, 0.5, 2, 16000, 1))
    (tmp_path / "text.wav").write_text("no audio")
    with pytest.raises(UserError, match="text.wav"):
        recognisers.read(tmp_path / "text.wav", 16000)


@pytest.mark.parametrize(
    ("signature", "gets"),
    [
        ("waves", False),
        ("waves, sizes", True),
        ("waves, mask=None, x_lens=None", True),
        ("waves, wav_lens=None", False),  # shares of the longest, as SpeechBrain has them
        ("waves, max_length=10", False),
        ("waves, **options", False),
    ],
)
def test_a_module_gets_lengths_where_it_takes_some(signature, gets):
    module = type("Takes", (torch.nn.Module,), {"forward": eval(f"lambda self, {signature}: [*locals().values()]")})()
    given = recognisers.of_module(module).call(torch.zeros(2, 30), torch.tensor([30, 30]))
    tensors = [tuple(value.shape) for value in given if isinstance(value, torch.Tensor)]
    assert tensors == ([(2, 30), (2,)] if gets else [(2, 30)])


@pytest.mark.parametrize("name", ["ConformerRNNT", "EmformerRNNT"])
def test_the_shipped_transducers_decode_every_utterance(name):
    torch.manual_seed(0)
    model = made("factory", f"{SHIPPED}:{name}", layers=1, dim=32, vocab_size=12, blank_bias=2.0)
    whole = outputs(model, 0.4)
    symbols = whole[1] if name == "ConformerRNNT" else whole
    assert len(symbols) == 2 and symbols[0] == symbols[1]  # equal rows
    if model.stream:
        pieces = list(outputs(model, 0.4, call=model.stream))
        assert len(pieces) == 2 * 3 and whole == [pieces[2], pieces[5]]  # 41 frames in sixteens


def test_values_of_the_command_line_are_over_those_of_the_file(config, capsys):
    words = ["--profiling_dimensions.batch_sizes=[1,2,3]", "--example_audio=null", "--audio_mockup_secs=[0.5, 2]"]
    given = cli.parser().parse_args([str(config()), "--seed", "3", *words])
    dimensions = cli.configured(given.config, given.overrides).profiling_dimensions
    assert (dimensions.batch_sizes, dimensions.audio_mockup_secs, given.seed) == ([1, 2, 3], [0.5, 2], 3)
    assert command(cli, "--threds", 2) == 2 and "--threds: give --key=value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ({}, ["--profiling_dimensions.batch_size=[1]"], ["batch_size", "batch_sizes"]),
        ({}, ["--batch_sizes=[1,1]"], ["batch_sizes", "1", "given twice"]),
        ({}, ["--audio_mockup_secs=[0]"], ["audio_mockup_secs", "> 0"]),
        ({}, ["--audio_mockup_secs=[.inf]"], ["audio_mockup_secs", "finite"]),
        ({}, ["--arguments={x: 1.0e+999}"], ["--arguments", "finite"]),
        ({}, ["--triangle_only=maybe"], ["triangle_only", "bool"]),
        ({}, ["--example_audio=nosuch.wav"], ["nosuch.wav", "no such file", "null"]),
        ({}, ["--batch_sizes=[1"], ["--batch_sizes", "YAML"]),
        ({"sourc": "x"}, [], ["sourc", "'source'"]),
        ({"python": "nosuch"}, [], ["python", "nosuch"]),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_key(config, model, overrides, words):
    with pytest.raises(UserError) as raised:
        cli.configured(config(model), overrides)
    assert "\n" not in str(raised.value) and all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_a_quick_profile_of_a_shipped_configuration_is_of_the_smallest_cells(path):
    for words, cells in (([], {"1s-x1", "2s-x1"}), (["--batch_sizes=[3]"], {"1s-x3", "2s-x3"})):
        quick = cli.configured(path, words, quick=True)
        assert {task.name for task in cli.planned(quick, None)} == cells
    file, _, name = quick.pretrained_model.source.rpartition(":")
    assert file == str(SHIPPED) and f"class {name}(" in SHIPPED.read_text()


def test_a_triangle_skips_exactly_the_heavy_corner():
    given = rows.Profile(pretrained_model=rows.Model(source="a:b"))
    grid = given.profiling_dimensions
    skipped = [(each.seconds, each.size) for each in rows.positions(given) if rows.is_skipped(each, grid)]
    assert sorted(skipped) == [(5, 8), (8, 4), (8, 8), (32, 4), (32, 8)] and len(cli.planned(given, None)) == 10


def test_numbers_of_a_cell():
    """172,400 us of self time over two batches of 4 x 5 s is the classic 4.31E-03; streams are batches in time."""
    position = rows.Position(2, "bfloat16", 5, 4)

    def row_of(seconds, **numbers):
        return rows.row_of(position, Job("ok", values=[as_written(cell(seconds, **numbers))]))

    row = row_of([0.5] * 8 + [3.0] * 2, cpu_us=172_400, profiled=2, cuda_peak_bytes=round(1.47 * 2**30))
    assert position.job == "5s-x4-threads-2-bfloat16"
    assert rows.factor(row.profiled_cpu_rtf) == "4.31E-03" and row.profiled_cuda_rtf is None
    assert row.rtf == 0.5 / 20 and row.utterances_per_second == 8 and row.n == 10
    assert [row_of([p90]).streams for p90 in (0.5, 3.0, 6.0)] == [40, 4, 0]
    assert rows.GRIDS["memory_peaks"].words(row) == "0.0010 + 1.47 GiB"


def test_the_answer_comes_first_and_says_what_ran_beside_load(tmp_path):
    for busy in (0, 2):
        text = rows.answer(read(write_inference(tmp_path / f"{busy}", busy=busy))).render("table")
        first = text.splitlines()[0]
        assert "faster than real time" in first and "streams: 40" in first and "2s-x4: oom" in text
        assert (first.count("beside other load") == 2) == ("E-02 busy" in text) == bool(busy), text
        assert ("beside other load" in first) == ("cells ran beside other load" in text) == bool(busy)


def test_a_run_is_text_rows_and_a_section_and_a_broken_one_is_a_line(tmp_path):
    write_inference(tmp_path)
    write_inference(tmp_path, "other").write_text("nonsense\n")
    shown = slice_of(rows.TOOL, rows.TITLE, rows.answer)
    made, broken = shown.sections(tmp_path, [tmp_path])
    assert len(made.tables) == 4 and "line 1" in str(broken.failures) and shown.holds(tmp_path)
    found = json.loads(run("summarize.py", tmp_path, "--format", "json").stdout)
    assert [row.get("rtf") for row in found] == [0.1, 0.025, 0.05, None, None] and found[-1]["status"] == "error"


def test_the_command_measures_every_cell(config, capsys):
    path = config(export_logs=True)
    cells = measured(path, "--format", "markdown")
    printed = capsys.readouterr().out
    assert [(each["audio_mockup_secs"], each["batch_sizes"]) for each in cells] == [
        (t, n) for t in (0.1, 0.2) for n in (1, 2)
    ]
    for each in cells:
        assert each["status"] == "ok" and each["n"] >= 1 and each["p50_s"] <= each["p90_s"] <= each["p99_s"]
        assert each["rtf"] == pytest.approx(each["p50_s"] / (each["batch_sizes"] * each["audio_mockup_secs"]))
        assert each["profiled_cpu_rtf"] > 0 and each["profiled_cuda_rtf"] is None and each["first_token_s"] is None
        assert each["process_peak_bytes"] > each["process_bytes"] >= 0
    # (N, 8, frames) of the convolution and its ReLU, at least, are there at once
    assert cells[3]["cpu_peak_bytes"] >= 2 * 2 * 8 * 39 * 4 and cells[3]["cpu_peak_bytes"] > cells[0]["cpu_peak_bytes"]
    assert "Real-time factor" in printed and "noise" in printed and "| audio | 1 | 2 |" in printed
    assert len(list(path.parent.glob("log/inference-tiny/traces/0.1s-x1-threads-1/*.pt.trace.json*"))) == 1


@pytest.mark.parametrize("pieces", [[None, [], [7], [7, 8]], [None, [], [], []]])
def test_the_first_token_is_the_first_piece_that_says_something(pieces, config):
    """The third piece; and a model that never says anything has no such time."""
    (each,) = measured(config({"source": "models.py:Streaming", "arguments": {"pieces": pieces}}, **ONE))
    assert each["status"] == "ok" and each["p50_s"] >= 0.08
    assert (0.06 <= each["first_token_s"] < each["p50_s"]) if any(pieces) else each["first_token_s"] is None


def test_a_cell_that_fails_is_a_cell(config):
    """Out of memory, and the cell after it is measured; with --resume what is there is not measured again."""
    path, counting = config({"arguments": {"limit": 2000}}, batch_sizes=[2, 1]), InProcess()
    assert [each["status"] for each in measured(path, code=1)] == ["ok", "ok", "oom", "ok"]
    assert "allocate memory" in measured(path, "--resume", code=1, executor=counting)[2]["reason"]
    assert counting.names == ["0.2s-x2-threads-1"] and len(list((path.parent / "log").glob("inference-*"))) == 1
    measured(path, "--resume", "--seed", "3", code=2)


def test_resuming_with_a_mistake_keeps_a_run_whose_jobs_all_failed(config, capsys):
    path = config({"arguments": {"limit": 1}}, **ONE)
    measured(path, code=1)
    (file,) = (path.parent / "log").glob("*/tool.jsonl")
    before = file.read_text()
    (path.parent / "models.py").write_text("nonsense = ")
    assert command(cli, path, "--log-dir", path.parent / "log", "--resume", "--device", "cpu", *SAME) == 2
    assert file.read_text().startswith(before) and "does not import" in capsys.readouterr().err


def test_a_slow_first_call_is_warm_up(config):
    (each,) = measured(config({"arguments": {"first": 0.3}}, **ONE))
    assert each["p99_s"] < 0.3
    (each,) = measured(config({"source": "models.py:Silent"}, **ONE), code=1)[-1:]
    assert each["status"] == "error" and "None" in each["reason"]


def test_the_grid_is_repeated_for_each_variant(config, capsys):
    cells = measured(config(**ONE), "--dtype", "float32,bfloat16", "--threads", "1,2")
    ways = [(each["threads"], each["dtype"]) for each in cells]
    assert ways == [(1, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16")]
    assert all(each["rtf"] > 0 for each in cells) and "threads 2, bfloat16" in capsys.readouterr().out
    assert [each["output_error"] is None for each in cells] == [True, False, True, False]
    assert 0 < cells[1]["output_error"] < 0.05


@pytest.mark.parametrize(("error", "status"), [(0.01, "ok"), (0.5, "error"), ("nan", "error"), ("inf", "error")])
def test_outputs_of_a_dtype_are_compared_with_those_in_float32_before_they_are_timed(error, status, config, capsys):
    arguments = {"dtype": "bfloat16", "error": error}
    path = config({"source": "models.py:Wrong", "arguments": arguments}, **ONE)
    plain, other = measured(path, "--dtype", "float32,bfloat16", code=int(status == "error"))
    assert (plain["status"], other["status"]) == ("ok", status)
    assert (other["rtf"] is None) == (status == "error") and ("wrong result" in other["reason"]) == (status == "error")


def test_outputs_that_are_nan_are_no_result(config):
    arguments = {"dtype": "float32", "error": "nan"}
    path = config({"source": "models.py:Wrong", "arguments": arguments}, **ONE)
    (each,) = measured(path, code=1)
    assert each["status"] == "error" and "NaN" in each["reason"] and each["rtf"] is None


@pytest.mark.parametrize(
    ("plain", "other", "error"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), 0),  # a mask
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, torch.nan]), torch.inf),
        ((torch.ones(2), "a"), (torch.ones(3), "a"), torch.inf),
        (torch.tensor([1j, 1.0]), torch.tensor([1.0 + 0j, 1.0]), 1),
        ({"score": 1.0}, {"score": 2.0}, 1),
        ([[1, 2, 3], [4]], [[2, 3], [4]], 0.25),  # an insertion is one edit
        ([{"text": "kitten"}], [{"text": "sitting"}], 3 / 7),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]), 0.25),
        ([], [[1]], 1),
    ],
)
def test_the_difference_of_outputs(plain, other, error):
    assert outputs_of_a_model.difference(plain, plain) == 0
    assert outputs_of_a_model.difference(plain, other) == pytest.approx(error)


def test_three_calls_are_timed_however_long_they_take(config, capsys):
    """The check is one call, warm-up is two that agree, then three timed ones are still slow."""
    (each,) = measured(config({"source": "models.py:Warming", "arguments": {"calls": 7}}, **ONE))
    assert each["n"] == 3 and each["p50_s"] > 0.2 and "contradicts" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "contradicts"), [(0.2, False), (0.002, True)])
def test_a_cell_whose_profile_says_something_else_is_named(seconds, contradicts, tmp_path):
    """Timed calls take 0.1 s; `seconds` is the self time of both profiled ones."""
    text = rows.answer(read(write_inference(tmp_path, cpu_us=1e6 * seconds))).render("table")
    assert ("contradicts" in text and "100 times" in text) == contradicts


def test_a_run_for_real(config):
    """Each cell in a process of its own: one that hangs is ended, and the one after it is measured."""
    path = config({"arguments": {"seconds": 600}}, audio_mockup_secs=[0.1], batch_sizes=[2, 1])
    flags = ("--log-dir", path.parent / "log", "--device", "cpu", "--threads", 1, "--max-seconds", 0.1)
    done = run("rnnt-bench", "inference", path, *flags, "--format", "json", "--timeout", 20)
    late, each = json.loads(done.stdout)
    assert done.returncode == 1 and each["status"] == "ok" and each["rtf"] > 0, done.stderr
    assert late["status"] == "timeout" and late["rtf"] is None and "--timeout" in late["reason"]
    assert_user_error(run("rnnt-bench", "inference", path.parent / "nosuch.yaml"), "nosuch.yaml")


ESTIMATION = """
{sample_rate: 16000, snrmin: 0, snrmax: 10, separation_norm_type: stnorm,
encoder: !new:speechbrain.nnet.containers.Sequential {
    cnn: !new:speechbrain.nnet.CNN.Conv1d {
        in_channels: 2, out_channels: 4, kernel_size: 4, stride: 2, skip_transpose: True, padding: valid},
    relu: !new:torch.nn.ReLU {}},
stat_pooling: !new:speechbrain.nnet.pooling.StatisticsPooling {},
encoder_out: !new:speechbrain.nnet.containers.Sequential {
    linear: !new:speechbrain.nnet.linear.Linear {input_size: 8, n_neurons: 1},
    sigmoid: !new:torch.nn.Sigmoid {}},
model: !new:torch.nn.ModuleList [[!ref <encoder>, !ref <encoder_out>]],
modules: {encoder: !ref <encoder>, encoder_out: !ref <encoder_out>},
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer {loadables: {model: !ref <model>}}}
"""


@pytest.mark.parametrize("name", recognisers.INTERFACES)
def test_each_interface_of_speechbrain_has_the_method_and_arguments(name):
    module, method = recognisers.INTERFACES[name]
    interface = getattr(pytest.importorskip(f"speechbrain.inference.{module}"), name)
    parameters = inspect.signature(getattr(interface, method)).parameters.values()
    needed = [part.name for part in parameters if part.default is part.empty and part.name != "self"]
    given = [recognisers._argument(each, torch.zeros(2, 30), torch.full((2,), 30)) for each in needed]
    assert given and not any(value is None for value in given)


def test_a_model_of_speechbrain_is_that_of_its_folder(tmp_path):
    """hyperparams.yaml, and the weights of each loadable; an estimate is of each of two speakers."""
    pytest.importorskip("speechbrain")
    weights = pytest.importorskip("hyperpyyaml").load_hyperpyyaml(ESTIMATION)["model"].state_dict()
    (tmp_path / "hyperparams.yaml").write_text(ESTIMATION)
    with pytest.raises(UserError, match="model.ckpt"):
        made("SNREstimator", tmp_path)
    torch.save(weights, tmp_path / "model.ckpt")
    answer, again = (outputs(made("SNREstimator", tmp_path), size=3) for _ in range(2))
    assert answer.shape == (6,) and answer.min() > 0 and answer.max() < 10 and torch.allclose(answer, again, rtol=1e-4)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Makes a bundle of torchaudio.pipelines, TINY, of another one, and puts its weights where torch looks for them."""
    pipelines = pytest.importorskip("torchaudio.pipelines")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def cache(bundle, below, weights, **changes):
        monkeypatch.setattr(pipelines, "TINY", dataclasses.replace(bundle, **changes), raising=False)
        (tmp_path / "hub" / below).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, tmp_path / "hub" / below)
        return tmp_path / "hub" / below

    return cache


def test_a_bundle_of_wav2vec2(cached):
    torchaudio = pytest.importorskip("torchaudio")
    bundle = torchaudio.pipelines.WAV2VEC2_ASR_BASE_960H
    small = {"embed_dim": 16, "num_layers": 1, "num_heads": 2, "ff_interm_features": 16}
    sizes = {**bundle._params, **{f"encoder_{key}": value for key, value in small.items()}}
    sizes |= {"extractor_conv_layer_config": [(8, 10, 5), (8, 8, 8), (8, 8, 8)]}
    sizes |= {"encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 2}
    torch.manual_seed(1)
    weights = torchaudio.models.wav2vec2_model(**sizes).state_dict()
    changes = {"_params": sizes, "_remove_aux_axis": (), "_labels": ("a",)}
    path = cached(bundle, f"checkpoints/{bundle._path}", weights, **changes)
    emissions, lengths = outputs(made("torchaudio", "TINY"))
    assert emissions.shape == (2, 24, 29) and lengths is None
    expected = torchaudio.models.wav2vec2_model(**sizes).eval()
    expected.load_state_dict(weights)
    assert torch.equal(emissions, outputs(recognisers.of_module(expected))[0])
    with pytest.raises(UserError, match="beam_width"):
        made("torchaudio", "TINY", beam_width=3)
    path.unlink()
    with pytest.raises(UserError, match=f"TINY cannot be made.*{path.parents[1]}"):
        made("torchaudio", "TINY")


def test_a_bundle_of_a_transducer(cached, tmp_path):
    torchaudio = pytest.importorskip("torchaudio")
    bundle = torchaudio.pipelines.EMFORMER_RNNT_BASE_LIBRISPEECH
    shipped = runpy.run_path(str(SHIPPED))["EmformerRNNT"]

    def small():
        return shipped(vocab_size=12, layers=1, dim=64, blank_bias=3).search.model

    torch.manual_seed(1)
    cached(bundle, f"torchaudio/{bundle._rnnt_path}", small().state_dict(), _rnnt_factory_func=small, _blank=11)
    stats = tmp_path / "hub" / "torchaudio" / bundle._global_stats_path
    stats.parent.mkdir(parents=True, exist_ok=True)
    stats.write_text(json.dumps({"mean": [0.0] * 80, "invstddev": [1.0] * 80}))
    model = made("torchaudio", "TINY", beam_width=2)
    answer = outputs(model)
    assert len(answer) == 2 and answer[0] == answer[1]  # equal rows
    assert all(0 <= symbol < 11 for symbol in answer[0])


def test_what_is_no_model():
    pytest.importorskip("torchaudio")
    for source in ("TACOTRON2_GRIFFINLIM_CHAR_LJSPEECH", "RNNTBundle", "__file__"):
        with pytest.raises(UserError, match="WAV2VEC2_ASR_BASE_960H"):
            made("torchaudio", source)
    with pytest.raises(UserError, match="EncoderDecoderASR"):
        made("EncoderDecoder", "x")


@pytest.mark.parametrize(
    ("kind", "source", "package", "call"),
    [
        ("transformers", "facebook/nosuch", "transformers", "pipeline("),
        ("EncoderASR", "speechbrain/nosuch", "speechbrain", "EncoderASR.from_hparams("),
        ("torchaudio", "WAV2VEC2_ASR_BASE_960H", "torchaudio", "bundle.get_model("),
        ("factory", "hf:facebook/nosuch", "transformers", "AutoModel.from_pretrained("),
    ],
)
def test_a_name_on_a_hub_says_that_the_network_is_forbidden_and_how_to_fetch_it(kind, source, package, call, cached):
    """No word of the connection: it is the command that forbids it, so that a run does not depend on it."""
    pytest.importorskip(package)
    with pytest.raises(UserError) as raised:
        made(kind, source)
    code = str(raised.value).partition('python -c "')[2].rstrip('"')
    assert "forbids the network" in str(raised.value) and "connection" not in str(raised.value)
    assert call in code and compile(code, "command", "exec")
    if kind != "torchaudio":
        with pytest.raises(UserError, match="no such folder"):
            made(kind, "hf:/nosuch/folder" if kind == "factory" else "/nosuch/folder")


def test_a_sentence_of_a_model_s_author_has_no_class_of_error(config, capsys):
    refusing = "\nclass Refusing(Tiny):\n    def __init__(self, size):\n        raise ValueError('size is 3: give 4')\n"
    path = config({"source": "models.py:Refusing", "arguments": {"size": 3}}, **ONE)
    (path.parent / "models.py").write_text(MODELS + refusing)
    assert command(cli, path, "--log-dir", path.parent / "log", "--device", "cpu", "--quiet") == 2
    line = capsys.readouterr().err
    assert "Refusing cannot be made: size is 3: give 4" in line and "ValueError" not in line


def test_a_pipeline_of_hugging_face(tmp_path):
    """A folder of a CTC model of random weights with its processor."""
    transformers = pytest.importorskip("transformers")
    words = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    features = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    transformers.Wav2Vec2Processor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(tmp_path)
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": [8, 8, 8], "conv_kernel": [10, 8, 8], "conv_stride": [5, 8, 8]}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(vocab_size=len(words), **layers, **convolutions, **positions)
    torch.manual_seed(1)
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    model = made("transformers", tmp_path)
    answer = outputs(model)
    assert model.sample_rate == 16000 and len(answer) == 2 and answer[0] == answer[1] and "text" in answer[0]
    assert answer == outputs(made("transformers", tmp_path))  # the weights are those of the folder

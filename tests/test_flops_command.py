"""The command flops as a user runs it, and what it puts together from a count."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import wave
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, assert_user_error, run
from fixtures_model_runs import InProcess

from common.core.guard import guarded
from common.core.units import quantity
from common.records import documents
from common.tools.flops import command
from common.tools.flops import show as flops
from common.tools.flops.show import Document

MODEL = '''
import torch
from torch import nn


class Encoder(nn.Module):
    """Two layers and a residual of its own."""

    def __init__(self, features=3, hidden=5, frozen=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x, lengths=None):
        return x + self.layers(x)

    def twice(self, x):
        return self(self(x))


class Waves(nn.Module):
    """Takes (N, samples)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 10, stride=5, bias=False)

    def forward(self, x):
        return self.conv(x[:, None])


def Nested():
    """A layer three names deep."""
    return Named(a=Named(b=Named(c=nn.Linear(3, 5))))


class Named(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Unknown(nn.Module):
    def __init__(self, name="odd"):
        super().__init__()
        self.operator = getattr(torch.ops.flopscommand, name)

    def forward(self, x):
        return self.operator(x)


made = Encoder()
number = 3
'''


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "encoder.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(autouse=True)
def as_a_process(monkeypatch):
    """Undo what the command leaves in its process: variables against downloads, folders of models and imports."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("encoder", "s3prl", "transformers"):
            del sys.modules[name]


@pytest.fixture
def count(capsys, tmp_path):
    """The command within this process, which has imported torch already."""

    def call(*arguments):
        try:
            log = ["--log-dir", str(tmp_path / "log"), "--quiet"]
            arguments = command.parser().parse_args([*map(str, arguments), *log])
            code = guarded("rnnt-bench flops", lambda: command.main(arguments, InProcess()))
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    return call


@pytest.fixture
def answer(count):
    def call(*arguments):
        done = count(*arguments, "--format", "json")
        assert done.returncode == 0, done.stderr
        (document,) = json.loads(done.stdout)
        return document

    return call


def test_the_script_helps_counts_and_ends_in_one_line(model, tmp_path):
    done = run("rnnt-bench", "flops", "--help")
    assert done.returncode == 0 and "torchaudio.models:wav2vec2_base --input-shape" in done.stdout
    log = ("--log-dir", tmp_path / "log", "--quiet")
    done = run("rnnt-bench", "flops", f"{model}:Encoder", "--input-shape", "4x3", "--backward", *log)
    assert done.returncode == 0 and "parameters: 38" in done.stdout and not done.stderr
    assert_user_error(run("rnnt-bench", "flops", f"{model}:Encoder", "--input-shape", "4x4"), "4x4", "layers.0")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_s_class_by_module(answer, model, device):
    document = answer(f"{model}:Encoder", "--input-shape", "4x3", "--device", device)
    assert document["total"]["macs"] == 4 * (15 + 15)
    assert document["total"]["flops"] == 140 + 20 + (120 + 12) + 12
    rows = {row["name"]: row for row in document["rows"]}
    assert rows[""]["flops"] == document["total"]["flops"] and rows[""]["own_flops"] == 12
    assert rows["layers"]["flops"] == 292 and rows["layers"]["own_flops"] == 0
    assert rows["layers.0"]["macs_share"] == 0.5 and rows["layers.0"]["trainable"] == 20
    assert sum(row["own_flops"] for row in document["rows"]) == document["total"]["flops"]


def test_depth_class_and_operator(answer, model):
    assert [row["name"] for row in answer(f"{model}:Encoder", "--input-shape", "4x3", "--depth", "1")["rows"]] == [
        "",
        "layers",
    ]
    linear = answer(f"{model}:Encoder", "--input-shape", "4x3", "--by", "class")["rows"][0]
    assert (linear["name"], linear["calls"], linear["macs"], linear["trainable"]) == ("Linear", 2, 120, 38)
    rows = answer(f"{model}:Encoder", "--input-shape", "4x3", "--by", "operator")["rows"]
    by_operator = {row["name"]: (row["calls"], row["flops"]) for row in rows}
    assert by_operator["aten::addmm"] == (2, 272) and by_operator["aten::add"] == (1, 12)


def test_backward_and_training(answer, model):
    document = answer(f"{model}:Encoder", "--input-shape", "4x3", "--backward", "--train")
    # second layer: weights 120, bias 3 x 3, input 120; ReLU 20; first: weights 120, bias 5 x 3; the input wants none
    assert document["total"]["backward_flops"] == 120 + 9 + 120 + 20 + 120 + 15
    assert document["total"]["backward_macs"] == 180


def test_arguments_from_yaml_and_flags(answer, model, tmp_path):
    (tmp_path / "encoder.yaml").write_text("hidden: 7\nfrozen: true\n")
    document = answer(
        f"{model}:Encoder", "--args", tmp_path / "encoder.yaml", "--arg", "features=2", "--input-shape", "4x2"
    )
    assert document["total"]["macs"] == 4 * 28
    assert (document["total"]["frozen"], document["total"]["trainable"]) == (21, 16)


def test_a_method_a_made_model_and_a_keyword(answer, model):
    assert answer(f"{model}:Encoder", "--method", "twice", "--input-shape", "4x3")["total"]["macs"] == 240
    counted = answer(f"{model}:made", "--input-shape", "4x3", "lengths@4:int64=3")
    assert counted["total"]["macs"] == 120


def test_an_importable_model(answer):
    arguments = {"input_dim": 8, "num_heads": 2, "ffn_dim": 16, "num_layers": 1, "depthwise_conv_kernel_size": 3}
    given = [word for key, value in arguments.items() for word in ("--arg", f"{key}={value}")]
    document = answer("torchaudio.models:Conformer", *given, "--input-shape", "2x10x8", "2:int64=10")
    positions, features = 20, 8
    feed_forward = 2 * 2 * positions * features * 16
    attention = 4 * positions * features**2 + 2 * 2 * 10 * 10 * features
    convolution = positions * features * (2 * features + 3 + features)
    assert document["total"]["macs"] == feed_forward + attention + convolution
    assert not document["not_counted"]


def test_the_total_comes_first_and_modules_go_two_names_deep(count, model):
    given = (f"{model}:Nested", "--input-shape", "4x3")
    lines = count(*given).stdout.splitlines()
    assert lines[0].startswith("total: 60 MACs") and lines[1].startswith("parameters: ")
    names = {line.split()[0] for line in lines if line}
    assert "a.b" in names and "a.b.c" not in names
    assert "a.b.c" in {line.split()[0] for line in count(*given, "--depth", "all").stdout.splitlines() if line}
    assert "a.b.c" in count(*given, "--format", "csv").stdout


def test_what_differs_on_the_meta_device_is_told(count):
    given = ("torch.nn:LSTM", "--arg", "input_size=3", "--arg", "hidden_size=4", "--input-shape", "5x2x3", "--backward")
    assert "LSTM" in [line for line in count(*given, "--device", "meta").stdout.splitlines() if line][-1]
    assert "meta device" not in count(*given).stdout


def test_formats(count, model):
    given = (f"{model}:Encoder", "--input-shape", "4x3", "--by", "operator")
    table = count(*given).stdout
    assert "304 FLOPs" in table and "total: 120 MACs (120), 304 FLOPs (304)" in table and "parameters: 38" in table
    rows = list(csv.DictReader(io.StringIO(count(*given, "--format", "csv").stdout)))
    assert rows[0]["name"] == "aten::addmm" and rows[0]["flops"] == "272"
    markdown = count(*given, "--format", "markdown").stdout
    assert markdown.startswith("- total: ") and "\n| operator |" in markdown


LIBRARY = torch.library.Library("flopscommand", "DEF")
for _name in ("odd", "even"):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")


def test_what_is_not_counted(count, model, tmp_path):
    given = (f"{model}:Unknown", "--input-shape", "4x3")
    done = count(*given)
    assert done.returncode == 0 and "not counted: flopscommand::odd in the model" in done.stdout
    done = count(*given, "--format", "csv")
    assert "flopscommand::odd" in done.stderr and "Traceback" not in done.stderr
    assert_user_error(count(*given, "--strict"), "flopscommand::odd", "register")
    (tmp_path / "mine.py").write_text(
        "from common.flops import rules\nrules.register('flopscommand::even', lambda call: call.out.numel())\n"
    )
    done = count(*given, "--arg", "name=even", "--strict", "--register", tmp_path / "mine.py")
    assert done.returncode == 0 and "12 FLOPs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch.package:Model", "--input-shape", "1x3"], ["nosuch"]),
        (["torchaudio.models:wav2vec2_bas", "--input-shape", "1x3"], ["wav2vec2_base"]),
        (["Model", "--input-shape", "1x3"], ["package.module:name"]),
        (["{model}:number", "--input-shape", "1x3"], ["int"]),
        (["{model}:Encoder", "--input-shape", "4x4"], ["4x4", "layers.0"]),
        (["{model}:Encoder", "--input-shape", "4xx"], ["4xx"]),
        (["{model}:Encoder", "--input-shape", "4x3:int65"], ["int65"]),
        (["{model}:Encoder", "--input-shape", "1xS"], ["--audio"]),
        (["{model}:Encoder", "--arg", "hiden=4", "--input-shape", "4x3"], ["hiden", "hidden"]),
        (["torchaudio.models:Conformer", "--input-shape", "4x3"], ["input_dim"]),
        (["{model}:Encoder", "--args", "{folder}/nosuch.yaml", "--input-shape", "4x3"], ["nosuch.yaml"]),
        (["{model}:Encoder", "--method", "nosuch", "--input-shape", "4x3"], ["nosuch"]),
        (["{model}:Encoder"], ["--input-shape"]),
        (["--input-shape", "4x3"], ["MODEL"]),
        (["{model}:Encoder", "--audio", "{folder}/empty"], ["empty", "no audio", ".wav"]),
        (["{model}:Encoder", "--audio", "{folder}/nosuch"], ["nosuch", "no such file or folder"]),
        (["{model}:Encoder", "--audio", "{folder}/damaged"], ["cannot read", "0.wav"]),
        (["{model}:Encoder", "--args", "{folder}/wrong.yaml", "--input-shape", "4x3"], ["hiden", "hidden"]),
        (["{model}:Encoder", "--device", "gpu", "--input-shape", "4x3"], ["gpu"]),
        (["{folder}/other.py:Encoder", "--input-shape", "4x3"], ["other.py"]),
        (["s3prl:hubert", "--pseudo-input"], ["s3prl"]),
        (["hf:facebook/hubert-base-ls960", "--pseudo-input"], ["hf:"]),
    ],
)
def test_bad_input_is_one_line(count, model, tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "0.wav").write_text("no audio")
    (tmp_path / "wrong.yaml").write_text("hiden: 4\n")
    given = [word.format(model=model, folder=tmp_path) for word in arguments]
    assert_user_error(count(*given), *words)


# -- speech ----------------------------------------------------------------------------------------------------------


def write_audio(folder, samples, rate=16000):
    folder.mkdir(exist_ok=True)
    for number, count_ in enumerate(samples):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(b"\0\0" * count_)


def macs_of(samples):
    return 2 * 10 * ((samples - 10) // 5 + 1)


def test_a_directory_of_audio_in_buckets(count, answer, model, tmp_path):
    samples = [8000, 16000, 12000, 24000, 20000, 32000, 28000, 40000]
    write_audio(tmp_path / "audio", samples)
    document = answer(f"{model}:Waves", "--audio", tmp_path / "audio")
    samples.sort()
    buckets = {bucket["bucket"]: bucket for bucket in document["buckets"]}
    assert list(buckets) == ["short", "medium", "long", "longer", "all"]
    assert buckets["medium"]["macs"] == sum(map(macs_of, samples[2:4]))
    assert (buckets["longer"]["shortest_s"], buckets["longer"]["longest_s"]) == (2.0, 2.5)
    assert buckets["all"]["macs"] == document["total"]["macs"] == sum(map(macs_of, samples))
    rates = [macs_of(length) / length * 16000 for length in samples]
    assert buckets["all"]["macs_per_s_min"] == pytest.approx(min(rates))
    assert buckets["all"]["macs_per_s_max"] == pytest.approx(max(rates))
    assert buckets["all"]["macs_per_s"] == pytest.approx(sum(map(macs_of, samples)) / sum(samples) * 16000)
    table = count(f"{model}:Waves", "--audio", tmp_path / "audio").stdout
    assert "longer" in table and quantity(buckets["all"]["macs"], "MACs") in table


def test_a_list_of_lengths_frames_and_another_rate(count, answer, model, tmp_path):
    (tmp_path / "lengths.txt").write_text("# samples\n1600 # first\n3200\n")
    buckets = answer(f"{model}:Encoder", "--audio", tmp_path / "lengths.txt", "--input-shape", "1xFx3")["buckets"]
    assert [bucket["macs"] for bucket in buckets] == [300, 600, 900]
    write_audio(tmp_path / "slow", [800], rate=8000)
    assert_user_error(count(f"{model}:Waves", "--audio", tmp_path / "slow"), "8000", "--sample-rate")
    assert len(answer(f"{model}:Waves", "--audio", tmp_path / "slow", "--sample-rate", "8000")["buckets"]) == 1
    (tmp_path / "lengths.txt").write_text("16 seconds\nten\n")
    assert_user_error(count(f"{model}:Waves", "--audio", tmp_path / "lengths.txt"), "line 2")


def test_pseudo_input(answer, model):
    (bucket,) = answer(f"{model}:Waves", "--pseudo-input", "16000", "--batch-size", "2")["buckets"]
    assert bucket["macs"] == 2 * macs_of(16000) and bucket["utterances"] == 2
    assert bucket["macs_per_s"] == macs_of(16000)


def test_upstreams_of_s3prl_take_a_list(count, answer, model, tmp_path):
    """A package of that name which has what the real one has: `hub`, whose functions make upstreams."""
    (tmp_path / "s3prl").mkdir()
    (tmp_path / "s3prl" / "__init__.py").write_text("")
    (tmp_path / "s3prl" / "hub.py").write_text(
        "from encoder import Waves\n"
        "class Upstream(Waves):\n"
        "    def forward(self, waves):\n"
        "        return [super(Upstream, self).forward(wave[None]) for wave in waves]\n"
        "def tiny(**arguments):\n"
        "    return Upstream()\n"
    )
    sys.path.insert(0, str(tmp_path))
    document = answer("s3prl:tiny", "--pseudo-input", "16000", "--batch-size", "2")
    assert document["total"]["macs"] == 2 * macs_of(16000)
    assert_user_error(count("s3prl:tony", "--pseudo-input"), "tiny")


def test_models_of_hugging_face_have_their_weights_here(answer, count, model, tmp_path, monkeypatch):
    """A package of that name which has what the real one has: AutoModel, which is told to fetch nothing."""
    (tmp_path / "transformers.py").write_text(
        "from encoder import Waves\n"
        "class AutoModel:\n"
        "    @staticmethod\n"
        "    def from_pretrained(name, local_files_only):\n"
        "        if name != 'here' or not local_files_only:\n"
        "            raise OSError(f'{name} is not a local folder and no cached files are there\\nmore lines')\n"
        "        return Waves()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # the real one, of another test
    assert answer("hf:here", "--pseudo-input", "16000")["total"]["macs"] == macs_of(16000)
    assert_user_error(count("hf:there/model", "--pseudo-input"), "there/model", "local")


def test_the_meta_device_has_no_values(count, model):
    done = count(
        "torchaudio.models:Conformer",
        *("--arg", "input_dim=8", "--arg", "num_heads=2", "--arg", "ffn_dim=16", "--arg", "num_layers=1"),
        *("--arg", "depthwise_conv_kernel_size=3", "--input-shape", "2x10x8", "2:int64=10", "--device", "meta"),
    )
    assert_user_error(done, "meta", "--device cpu")


HUBERT = ("torchaudio.models:hubert_pretrain_base", "--arg", "num_classes=504", "--method", "wav2vec2.extract_features")


# -- words, breakdowns, rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0, "FLOPs", "0 FLOPs"),
        (999, "FLOPs", "999 FLOPs"),
        (1000, "FLOPs", "1.0 KFLOPs"),
        (1_230_000, "MACs", "1.23 MMACs"),
        (999_999, "MACs", "1.0 MMACs"),
        (149_256_000_000, "MACs", "149.26 GMACs"),
        (94_697_600, "", "94.7 M"),
        (12, "", "12"),
    ],
)
def test_quantities(value, unit, words):
    assert quantity(value, unit) == words


def entry(path, operator="aten::mm", phase="forward", macs=10, flops=20):
    return {"path": path, "operator": operator, "phase": phase, "calls": 1, "macs": macs, "flops": flops}


COUNTED = {
    "modules": [
        {"path": path, "class": kind, "calls": 1, "trainable": 5, "frozen": 1}
        for path, kind in (("", "Model"), ("a", "Block"), ("a.b", "Linear"), ("a.b.c", "Norm"))
    ],
    "counts": [entry("a"), entry("a.b.c"), entry("a.b.c", phase="backward", macs=7), entry("(outside)", "aten::add")],
    "not_counted": [{"operator": "x::y", "path": "a", "reason": "no rule", "calls": 3}],
}


DOCUMENT = documents.typed(COUNTED, Document)


def test_every_depth_adds_up():
    for depth in (0, 1, 2, None):
        *found, total = flops.parts_of(DOCUMENT, "module", depth)
        parts = {part.name: part for part in found}
        assert (total.macs, total.flops, total.backward_macs, total.trainable) == (37, 80, 7, 20)
        assert parts[""].flops + parts["(outside)"].flops == total.flops
        assert parts[""].macs == 27 and parts[""].trainable == 20 and parts[""].frozen == 4
    assert parts["a.b"].flops == 40 and parts["a.b"].own_flops == 0 and parts["a.b"].backward_flops == 20
    for by in ("class", "operator"):
        *found, total = flops.parts_of(DOCUMENT, by)
        assert sum(part.flops for part in found) == total.flops


def test_runs_are_added_up_and_parameters_are_not():
    both = flops.merged([DOCUMENT, DOCUMENT])
    parts = flops.parts_of(both)
    assert parts[-1].flops == 160 and parts[-1].trainable == 20 and parts[0].calls == 2
    assert flops.not_counted(both) == ["x::y in a (no rule)"]


def test_a_python_without_torch_is_a_line_or_goes_on_in_the_main_environment(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "sys.modules['torch'] = None\n"
    )
    given = ["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=5", "--input-shape", "2x3"]
    done = run("rnnt-bench", "flops", *given, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert_user_error(done, "make setup")


@pytest.mark.thorough
def test_hubert_base_on_the_utterances_of_superb(answer):
    """Its profiler's buckets, and 94.7 M parameters; it takes 0.12 to 2.48 GMACs more, see docs/flops.md."""
    document = answer(*HUBERT, "--audio", ROOT / "docs" / "superb_lengths.txt", "--device", "meta")
    macs = {bucket["bucket"]: round(bucket["macs"] / 1e9, 2) for bucket in document["buckets"][:-1]}
    assert macs == {"short": 149.13, "medium": 260.97, "long": 421.65, "longer": 833.77}
    assert document["total"]["trainable"] == 94697600 and quantity(94697600) == "94.7 M"

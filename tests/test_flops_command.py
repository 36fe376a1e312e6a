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
from rnnt_bench.core.text import quantity
from rnnt_bench.records import schema
from rnnt_bench.tools.flops import command
from rnnt_bench.tools.flops import show as flops

import test_flops  # noqa: F401  (its operators)
from commands import ROOT, assert_user_error, run
from fixtures_model_runs import command as in_process

MODEL = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, features=3, hidden=5, frozen=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x, lengths=None):
        return x + self.layers(x)

    def twice(self, x):
        return self(self(x))


class Waves(nn.Conv1d):
    def __init__(self):
        super().__init__(1, 2, 10, stride=5, bias=False)

    def forward(self, x):
        return super().forward(x[:, None])


def Nested():
    return nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 5))))


class Unknown(nn.Module):
    def __init__(self, name="odd"):
        super().__init__()
        self.forward = getattr(torch.ops.flopstest, name)


made = Encoder()
number = 3
"""


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
    """The command with its job in this process, which has imported torch already."""

    def call(*words):
        try:
            code = in_process(command, *words, "--log-dir", tmp_path / "log", "--quiet")
        except SystemExit as stopped:
            code = stopped.code
        return SimpleNamespace(returncode=code, **dict(zip(("stdout", "stderr"), capsys.readouterr())))

    return call


@pytest.fixture
def answer(count):
    """The rows of a count by name, or by bucket."""

    def call(*arguments):
        done = count(*arguments, "--format", "json")
        assert done.returncode == 0, done.stderr
        return {row.get("name", row.get("bucket")): row for row in json.loads(done.stdout)}

    return call


def test_the_command_helps_counts_and_ends_in_one_line(model, tmp_path):
    done = run("rnnt-bench", "flops", "--help")
    assert done.returncode == 0 and "torchaudio.models:wav2vec2_base --input-shape" in done.stdout
    log = ("--log-dir", tmp_path / "log", "--quiet")
    done = run("rnnt-bench", "flops", f"{model}:Encoder", "--input-shape", "4x3", "--backward", *log)
    assert done.returncode == 0 and "parameters: 38" in done.stdout and not done.stderr
    assert_user_error(run("rnnt-bench", "flops", f"{model}:Encoder", "--input-shape", "4x4", *log), "4x4", "layers.0")
    assert [path.name for path in (tmp_path / "log").iterdir() if path.is_dir()] == ["flops-encoder.py-Encoder"]


def test_module_depth_class_and_operator(answer, model):
    given = (f"{model}:Encoder", "--input-shape", "4x3")
    rows = answer(*given)
    assert rows == answer(*given, "--device", "meta")
    assert (rows["total"]["macs"], rows["total"]["flops"]) == (4 * (15 + 15), 140 + 20 + (120 + 12) + 12)
    assert rows[""]["flops"] == rows["total"]["flops"] and rows["layers"]["flops"] == 292
    assert rows["layers.0"]["macs_share"] == 0.5 and rows["layers.0"]["trainable"] == 20
    assert list(answer(*given, "--depth", "1")) == ["", "layers", "total"]
    linear, rows = answer(*given, "--by", "class")["Linear"], answer(*given, "--by", "operator")
    assert (linear["calls"], linear["macs"], linear["trainable"]) == (2, 120, 38)
    assert [(rows[name]["calls"], rows[name]["flops"]) for name in ("aten::addmm", "aten::add")] == [(2, 272), (1, 12)]


def test_backward_training_arguments_and_a_method(answer, model, tmp_path):
    given = (f"{model}:Encoder", "--input-shape", "4x3")
    total = answer(*given, "--backward", "--train")["total"]
    # second layer: weights 120, bias 3 x 3, input 120; ReLU 20; first: weights 120, bias 5 x 3; the input wants none
    assert (total["backward_flops"], total["backward_macs"]) == (120 + 9 + 120 + 20 + 120 + 15, 180)
    (tmp_path / "encoder.yaml").write_text("hidden: 7\nfrozen: true\n")
    made = ("--args", tmp_path / "encoder.yaml", "--arg", "features=2", "--input-shape", "4x2")
    total = answer(f"{model}:Encoder", *made)["total"]
    assert (total["macs"], total["frozen"], total["trainable"]) == (4 * 28, 21, 16)
    assert answer(*given, "--method", "twice")["total"]["macs"] == 240
    assert answer(f"{model}:made", "--input-shape", "4x3", "lengths@4:int64=3")["total"]["macs"] == 120


def test_an_importable_model_and_the_meta_device_which_has_no_values(answer, count):
    flags = "input_dim=8 num_heads=2 ffn_dim=16 num_layers=1 depthwise_conv_kernel_size=3".replace(" ", " --arg ")
    words = f"torchaudio.models:Conformer --arg {flags} --input-shape 2x10x8 2:int64=10".split()
    positions, features = 20, 8
    feed_forward = 2 * 2 * positions * features * 16
    attention = 4 * positions * features**2 + 2 * 2 * 10 * 10 * features
    convolution = positions * features * (2 * features + 3 + features)
    assert answer(*words, "--strict")["total"]["macs"] == feed_forward + attention + convolution
    assert_user_error(count(*words, "--device", "meta"), "meta", "--device cpu")


def test_the_total_comes_first_and_modules_go_two_names_deep(count, model):
    given = (f"{model}:Nested", "--input-shape", "4x3")
    printed = count(*given).stdout
    assert printed.startswith("total: 60 MACs") and "\n0.0 " in printed and "\n0.0.0 " not in printed
    assert "\n0.0.0 " in count(*given, "--depth", "all").stdout
    rows = list(csv.DictReader(io.StringIO(count(*given, "--format", "csv").stdout)))
    assert [row["name"] for row in rows] == ["", "0", "0.0", "0.0.0", "total"] and rows[-1]["macs"] == "60"
    assert "\n| module | class |" in count(*given, "--format", "markdown").stdout


def test_what_is_not_counted(count, model, tmp_path):
    given = (f"{model}:Unknown", "--input-shape", "4x3")
    done = count(*given)
    assert done.returncode == 0 and "not counted: flopstest::odd in the model" in done.stdout
    assert "flopstest::odd" in count(*given, "--format", "csv").stderr
    assert_user_error(count(*given, "--strict"), "flopstest::odd", "register")
    (tmp_path / "mine.py").write_text(
        "import rnnt_bench\nrnnt_bench.flop_rules.register('flopstest::even', lambda call: call.out.numel())\n"
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
        (["{model}:Encoder", "--audio", "{folder}/wrong.txt"], ["line 2"]),
        (["{model}:Encoder", "--device", "gpu", "--input-shape", "4x3"], ["gpu"]),
        (["{folder}/other.py:Encoder", "--input-shape", "4x3"], ["other.py"]),
        (["s3prl:hubert", "--pseudo-input"], ["s3prl"]),
        (["hf:facebook/hubert-base-ls960", "--pseudo-input"], ["hf:"]),
    ],
)
def test_bad_input_is_one_line(count, model, tmp_path, arguments, words):
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "0.wav").write_text("no audio")
    (tmp_path / "wrong.txt").write_text("16 seconds\nten\n")
    assert_user_error(count(*(word.format(model=model, folder=tmp_path) for word in arguments)), *words)


def write_audio(folder, samples, rate=16000):
    folder.mkdir(exist_ok=True)
    for number, count_ in enumerate(samples):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(b"\0\0" * count_)


def macs_of(samples):
    return 2 * 10 * ((samples - 10) // 5 + 1)


def test_a_directory_of_audio_in_buckets(count, answer, model, tmp_path):
    samples = [8000, 12000, 16000, 20000, 24000, 28000, 32000, 40000]
    write_audio(tmp_path / "audio", samples[::-1])
    buckets = answer(f"{model}:Waves", "--audio", tmp_path / "audio")
    assert list(buckets) == ["short", "medium", "long", "longer", "all", "", "total"]
    assert buckets["medium"]["macs"] == sum(map(macs_of, samples[2:4]))
    assert (buckets["longer"]["shortest_s"], buckets["longer"]["longest_s"]) == (2.0, 2.5)
    rates = [macs_of(length) / length * 16000 for length in samples]
    of_all = [buckets["all"][key] for key in ("macs", "macs_per_s_min", "macs_per_s_max", "macs_per_s")]
    total = sum(map(macs_of, samples))
    assert of_all == pytest.approx([total, min(rates), max(rates), total / sum(samples) * 16000])


def test_lengths_frames_pseudo_input_and_another_rate(count, answer, model, tmp_path):
    (tmp_path / "lengths.txt").write_text("# samples\n1600 # first\n3200\n")
    buckets = answer(f"{model}:Encoder", "--audio", tmp_path / "lengths.txt", "--input-shape", "1xFx3")
    assert [bucket["macs"] for bucket in buckets.values() if "bucket" in bucket] == [300, 600, 900]
    write_audio(tmp_path / "slow", [800], rate=8000)
    assert_user_error(count(f"{model}:Waves", "--audio", tmp_path / "slow"), "8000", "--sample-rate")
    assert "macs" in answer(f"{model}:Waves", "--audio", tmp_path / "slow", "--sample-rate", "8000")["longer"]
    rows = answer(f"{model}:Waves", "--pseudo-input", "16000", "--batch-size", "2")
    bucket = rows["pseudo"]
    assert rows["total"]["macs"] == bucket["macs"]
    assert bucket["macs"] == 2 * macs_of(16000) and bucket["utterances"] == 2
    assert bucket["macs_per_s"] == macs_of(16000)


def test_upstreams_of_s3prl_take_a_list(count, answer, model, tmp_path):
    (tmp_path / "s3prl").mkdir()
    (tmp_path / "s3prl" / "hub.py").write_text(
        "from encoder import Waves\n"
        "class Upstream(Waves):\n"
        "    def forward(self, waves):\n"
        "        return [super(Upstream, self).forward(wave[None]) for wave in waves]\n"
        "def tiny(**arguments):\n"
        "    return Upstream()\n"
    )
    sys.path.insert(0, str(tmp_path))
    counted = answer("s3prl:tiny", "--pseudo-input", "16000", "--batch-size", "2")
    assert counted["pseudo"]["macs"] == 2 * macs_of(16000)
    assert_user_error(count("s3prl:tony", "--pseudo-input"), "tiny")


def test_models_of_hugging_face_have_their_weights_here(answer, count, model, tmp_path, monkeypatch):
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
    assert answer("hf:here", "--pseudo-input", "16000")["pseudo"]["macs"] == macs_of(16000)
    assert_user_error(count("hf:there/model", "--pseudo-input"), "network", "from_pretrained('there/model')")


@pytest.mark.thorough
def test_hubert_base_on_the_utterances_of_superb(count, answer):
    """Its profiler's buckets, and 94.7 M parameters; it takes 0.12 to 2.48 GMACs more, see docs/flops.md."""
    given = "torchaudio.models:hubert_pretrain_base --arg num_classes=504 --method wav2vec2.extract_features".split()
    given += ["--audio", ROOT / "docs" / "superb_lengths.txt", "--device", "meta"]
    macs = {row["bucket"]: round(row["macs"] / 1e9, 2) for row in answer(*given).values() if "bucket" in row}
    del macs["all"]
    assert macs == {"short": 149.13, "medium": 260.97, "long": 421.65, "longer": 833.77}
    assert "94697600" in count(*given).stdout


@pytest.mark.parametrize("value, words", [(999, "999 F"), (1_230_000, "1.23 MF"), (999_999, "1.0 MF"), (12, "12 F")])
def test_quantities(value, words):
    assert quantity(value, "F") == words


ENTRIES = [
    ("a", "aten::mm", "forward", 1, 10, 20),
    ("a.b.c", "aten::mm", "forward", 1, 10, 20),
    ("a.b.c", "aten::mm", "backward", 1, 7, 20),
    ("(outside)", "aten::add", "forward", 1, 10, 20),
]
COUNTED = {
    "buckets": [],
    "modules": [
        {"path": path, "class": kind, "calls": 1, "trainable": 5, "frozen": 1}
        for path, kind in (("", "Model"), ("a", "Block"), ("a.b", "Linear"), ("a.b.c", "Norm"))
    ],
    "counts": [dict(zip(("path", "operator", "phase", "calls", "macs", "flops"), entry)) for entry in ENTRIES],
    "not_counted": [],
}


def test_every_depth_adds_up():
    counted = schema.typed(COUNTED, flops.Counted)
    for depth in (0, 1, 2, None):
        *found, total = flops.parts_of(counted, "module", depth)
        parts = {part.name: part for part in found}
        assert (total.calls, total.trainable, total.frozen, total.macs, total.flops) == (4, 20, 4, 37, 80)
        assert (total.backward_macs, total.backward_flops) == (7, 20)
        assert parts[""].flops + parts["(outside)"].flops == 80 and parts[""].calls == 1
        assert (parts[""].macs, parts[""].trainable, parts[""].frozen) == (27, 20, 4)
    assert parts["a.b"].flops == 40 and parts["a.b"].backward_flops == 20
    for by in ("class", "operator"):
        *found, total = flops.parts_of(counted, by)
        assert sum(part.flops for part in found) == total.flops and total.calls == 4


def test_a_python_without_torch_is_a_line_or_goes_on_in_the_main_environment(tmp_path):
    found = "find = util.find_spec\nutil.find_spec = lambda name, *of: None if name == 'torch' else find(name, *of)\n"
    text = f"import importlib.util as util, sys\n{found}sys.modules['torch'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    given = ["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=5", "--input-shape", "2x3"]
    done = run("rnnt-bench", "flops", *given, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert_user_error(done, "make setup")

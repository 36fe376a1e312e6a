"""profile_model.py: the model's parameters, the labels, what adds up, and the command as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import List

import pytest
import torch
from commands import KILLS, ROOT, assert_user_error, run
from fixtures_model_runs import InProcess, write_profile
from torch import nn

from common.core.guard import guarded
from common.measure.clock import Clock
from common.records import documents
from common.tools.profile import command as cli
from common.tools.profile import icefall, transducer
from common.tools.profile import labels as labelling
from common.tools.profile import table as tables
from common.tools.profile.documents import Profile
from common.tools.profile.labels import Labels, Spans
from common.tools.profile.plot import figures
from common.tools.profile.rows import profile

SMALL = {
    "embed_channels": "[2,2,4]",
    "encoder_dim": 16,
    "heads": 2,
    "feed_forward": 24,
    "kernel": 5,
    "decoder_dim": 12,
    "joiner_dim": 14,
    "vocab_size": 11,
    "layers": 2,
}
CLASSIC = {
    "rnnt_encoder",
    "rnnt_encoder_embed",
    "rnnt_encoder_layer",
    "rnnt_encoder_layer_feed_forward_macaron",
    "rnnt_encoder_layer_self_attn",
    "rnnt_encoder_layer_conv",
    "rnnt_encoder_layer_feed_forward",
    "rnnt_decoder",
    "rnnt_loss_simple",
    "rnnt_loss_pruned",
    "joiner",
}
LAYER = "rnnt_encoder_layer"

MODELS = '''
import torch
from torch import nn


class Whole(nn.Module):
    """Logits (N, T, U+1, V) of features and symbols."""

    def __init__(self, vocab_size=11, wanted=1, expected="", still=False):
        super().__init__()
        self.expected, self.still, self.dropout = expected, still, nn.Dropout(0.5)
        self.front, self.symbols, self.out = nn.Linear(80, 8), nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.wanted = wanted

    def forward(self, features, lengths, symbols, symbol_lengths):
        torch.empty(self.wanted)
        if self.expected and str(self.front(features).dtype) != f"torch.{self.expected}":
            raise ValueError(f"no {self.expected}")
        if self.still and not torch.equal(self.dropout(features), features):
            raise ValueError("dropout")
        frames, tokens = self.front(features[:, ::4]), self.symbols(symbols)
        return self.out(torch.tanh(frames[:, :, None] + tokens[:, None])), (lengths + 3) // 4
'''


@pytest.fixture(scope="module", autouse=True)
def as_before():
    """The command sets up torch for its process, which is this one."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def command(*arguments):
    """The command in this process, as `run` runs it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            flags = cli.parser().parse_args(list(map(str, arguments)))
            code = guarded("profile_model.py", lambda: cli.main(flags, InProcess()))
        except SystemExit as stop:
            code = stop.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def profiled(folder, shapes, *flags, layers=2):
    sizes = [f"--size={key}={value}" for key, value in {**SMALL, "layers": layers}.items()]
    quick = ("--threads", 1, "--limits", "false", "--warmup", 0, "--trace-steps", 1, "--steps", 1)
    return command("--log-dir", folder, "--shape-file", shapes, *quick, *sizes, *flags)


def rows_in(folder):
    return {row["name"]: row for row in json.loads((folder / "profile.json").read_text())[0]["rows"]}


@pytest.fixture(scope="module")
def of_features(tmp_path_factory):
    """A shape file of feature frames, as generate_shape_info.py --features writes it."""
    folder = tmp_path_factory.mktemp("shapes")
    torch.save(torch.tensor([[60 + 9 * i, 6 + i] for i in range(6)], dtype=torch.int32), folder / "shapes.features.pt")
    provenance = {"options": {"subsampling_factor": 1}}
    (folder / "shapes.features.json").write_text(json.dumps(provenance), encoding="utf-8")
    return folder / "shapes.features.pt"


@pytest.fixture(scope="module")
def twelve(tmp_path_factory, of_features):
    """(what the command printed, its folder) of 12 layers and 8 steps."""
    folder = tmp_path_factory.mktemp("log")
    flags = ("--steps", 8, "--batch-size", 2, "--optimizer", "--limits", "true")
    done = profiled(folder, of_features, *flags, layers=12)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "profile-2"


@pytest.fixture(scope="module")
def rows(twelve):
    return rows_in(twelve[1])


# -- the model ---------------------------------------------------------------------------------------------------------


def criterion_of(name):
    from common.core import scripts, settings
    from common.core.implementations import find

    adapter = scripts.load(find(name).script)(settings.resolve({}, "cpu"), "")
    adapter.load("cpu")
    return transducer.Criterion(adapter, torch.device("cpu"))


def test_parameters_differ_from_icefall_by_what_the_documentation_says():
    """A layer has no relative positions (263,168), no scales and eps (22), and six affine norms (6,144)."""
    counts = transducer.parameters(transducer.Transducer(transducer.Sizes(), criterion_of("fast_rnnt-pruned")))
    assert counts["layer"] == 6_317_590 - 263_168 - 22 + 6_144
    assert counts["embed"] == 1_285_112 - 8 + 1_024
    assert counts["encoder"] == counts["embed"] + 12 * counts["layer"]
    assert counts["decoder"] == 257_026 - 2
    assert counts["joiner"] == 781_818 - 6
    assert counts["simple_am_proj"] == counts["simple_lm_proj"] == 256_502 - 2
    text = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    for part in ("model", "encoder", "embed", "layer", "decoder", "joiner", "simple_am_proj"):
        assert f"| {counts[part]:,} |" in text


def icefall_model(**sizes):
    return icefall.transducer(transducer.Sizes(**sizes), criterion_of("fast_rnnt-pruned"))


def test_icefall_s_model_has_its_parameters():
    published = {"model": 78_648_040, "encoder": 77_096_192, "embed": 1_285_112, "layer": 6_317_590}
    published.update(decoder=257_026, joiner=781_818, simple_am_proj=256_502, simple_lm_proj=256_502)
    assert transducer.parameters(icefall_model()) == published


def test_relative_attention_is_that_of_transformer_xl():
    """Score by score, in plain loops: (q_i + u) k_j + (q_i + v) W p(i - j), over the root of the head's size."""
    torch.manual_seed(1)
    of = transducer.Sizes(encoder_dim=8, heads=2, dropout=0.0)
    attention, positions = icefall.RelativeAttention(of), icefall.Positions(of)
    x, T, D = torch.randn(1, 5, 8), 5, 4
    x, table = positions(x)
    query, key, value = attention.in_proj(x[0]).chunk(3, dim=-1)
    expected = torch.empty(T, 8)
    for head in range(2):
        part = slice(head * D, (head + 1) * D)
        u, v = attention.content_bias[head], attention.position_bias[head]
        for i in range(T):
            scores = []
            for j in range(3):  # the last two are padding
                at = torch.tensor([(i - j) * 10000 ** (-k / 8) for k in range(0, 8, 2)])
                sinusoid = torch.stack([at.sin(), at.cos()], dim=1).flatten()
                projected = attention.linear_pos(sinusoid)[part]
                q = query[i, part] / D**0.5
                scores.append((q + u) @ key[j, part] + (q + v) @ projected)
            expected[i, part] = torch.stack(scores).softmax(0) @ value[:3, part]
    padding = torch.arange(T)[None] >= 3
    result = attention(x.transpose(0, 1), table, padding)[:, 0]
    torch.testing.assert_close(result, attention.out_proj(expected), rtol=1e-4, atol=1e-5)


def test_double_swish_and_balancer_have_the_published_gradients():
    x = torch.tensor([[-1.0, 0.3], [0.2, 0.4], [0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(icefall.DoubleSwish(), x)
    balanced = icefall.Balancer(positive=(0.05, 0.9), magnitude=(0.5, 100.0))(x)
    assert torch.equal(balanced, x)
    balanced.backward(torch.ones_like(x))
    # column 0: two of three positive, mean magnitude 1.3 / 3 too small; column 1: all positive, 0.1 over its most
    small = torch.tensor([0.01, -0.01, -0.01], dtype=torch.float64)
    many = torch.full((3,), 0.01, dtype=torch.float64)
    torch.testing.assert_close(x.grad, 1 + torch.stack([small, many], dim=1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"encoder_dims": 4}, ["encoder_dims", "'encoder_dim'"]),
        ({"layers": 0}, ["layers", "at least 1"]),
        ({"heads": 5}, ["encoder_dim", "multiple"]),
        ({"kernel": 4}, ["kernel", "odd"]),
        ({"dropout": 1}, ["dropout"]),
    ],
)
def test_sizes_are_checked(given, words):
    with pytest.raises(transducer.UserError) as error:
        transducer.sizes(given, "x.yaml")
    assert all(word in str(error.value) for word in ["x.yaml", *words])


# -- labels ------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A shared layer, a keyword argument, one tensor given three times, an input without a gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, symbols):
        x = self.layer(self.embed(symbols))
        x, _ = self.attention(query=x, key=x, value=x, need_weights=False)
        return self.layer(x).sum()


def labelled(model, paths, run):
    spans = Spans(Clock(torch.device("cpu")))
    with Labels(model, paths, spans) as labels:
        run(labels)
        labels.end_backward()
    return spans.taken()


def test_labels_change_no_gradient_and_leave_no_hook():
    torch.manual_seed(0)
    model, symbols = Twice(), torch.tensor([[1, 2, 3]])
    model(symbols).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    paths = {"embed": "embed", "layer": "layer", "attention": "attention"}
    taken = labelled(model, paths, lambda _: model(symbols).backward())
    assert all(torch.equal(parameter.grad, right) for parameter, right in zip(model.parameters(), wanted))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    calls = {(chain, phase): count for (chain, phase), (count, _, _) in taken.items()}
    assert calls == {((name,), phase): 1 + (name == "layer") for name in paths for phase in ("forward", "backward")}


def test_backward_lies_in_the_backward_of_the_caller():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3))
    paths = {"0": "outer", "0.0": "inner", "1": "last"}
    taken = labelled(model, paths, lambda _: model(torch.ones(2, 3)).sum().backward())
    assert set(taken) == {
        (chain, phase) for chain in (("outer",), ("outer", "inner"), ("last",)) for phase in ("forward", "backward")
    }
    for phase in ("forward", "backward"):
        assert taken[("outer", "inner"), phase][1] <= taken[("outer",), phase][1]


def test_what_a_checkpoint_computes_again_is_backward():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    paths = {"0": "linear"}
    x = torch.ones(2, 3, requires_grad=True)
    taken = labelled(layer, paths, lambda _: checkpoint(layer, x, use_reentrant=False).sum().backward())
    assert taken[("linear",), "forward"][0] == 1 and taken[("linear",), "backward"][0] >= 1


def test_where_it_failed():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    labels = Labels(model, {"1": "second"}, lambda *_: nullcontext())
    with pytest.raises(RuntimeError), labels:
        model(torch.ones(1, 2))
    assert labels.where == "second (1), forward"


def test_patterns_are_of_whole_names():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])})
    assert labelling.by_patterns(model, {"x": ("layers.*",)}) == {"layers.0": "x", "layers.1": "x"}
    assert labelling.by_depth(model, 2) == {"layers.0": "layers.*", "layers.1": "layers.*"}
    with pytest.raises(transducer.UserError, match=r"layers\.\*"):
        labelling.by_patterns(model, {"x": ("layer.*",)})


# -- the command -------------------------------------------------------------------------------------------------------


def test_twelve_layers_and_eight_steps_are_96_calls(rows):
    assert {row["label"] for row in rows.values()} - {"optimizer", "other", "step"} == CLASSIC
    for label in CLASSIC:
        in_layer = label.startswith("rnnt_encoder_layer")
        assert rows[label]["calls"] == rows[f"{label}.backward"]["calls"] == (96 if in_layer else 8)


def test_time_adds_up_to_the_step(twelve, rows):
    kept = profile(documents.read(twelve[1] / "profile.json", List[Profile])[0])

    def check(node):
        assert sum(child.ms for child in node.children) <= node.ms and node.own_ms >= 0
        for child in node.children:
            check(child)

    for node in kept.roots:
        check(node)
    step = rows["step"]["ms"]
    assert sum(row["own_ms"] for row in rows.values()) == pytest.approx(step)
    assert rows["other"]["ms"] >= 0 and rows["step"]["share"] == 1
    assert rows["rnnt_encoder"]["ms_per_call"] == pytest.approx(rows["rnnt_encoder"]["ms"])
    assert rows[f"{LAYER}_conv"]["ms_per_call"] == pytest.approx(rows[f"{LAYER}_conv"]["ms"] / 12)


def test_memory_is_that_of_a_step(rows):
    peaks = [row["peak_mb"] for row in rows.values() if row["peak_mb"] is not None]
    assert max(peaks) == rows["step"]["peak_mb"] > 0
    assert rows["rnnt_encoder"]["left_mb"] >= rows["rnnt_encoder_layer"]["left_mb"] > 0
    assert abs(rows["step"]["left_mb"]) < 0.01


def test_flops_are_those_of_the_layers(twelve, rows):
    """A feed-forward has two products, each of 16 x 24 weights, for every frame with its padding, in 12 layers."""
    batch = json.loads((twelve[1] / "profile.json").read_text())[0]["batches"][0]
    macs = 2 * batch["N"] * batch["T_max"] * 16 * 24 * 12
    for name in ("feed_forward", "feed_forward_macaron"):
        assert rows[f"{LAYER}_{name}"]["macs"] == macs
        assert rows[f"{LAYER}_{name}.backward"]["macs"] == 2 * macs
    parts = [row["macs"] for row in rows.values() if row["depth"] == 0 and row["label"] != "step"]
    assert sum(parts) == rows["step"]["macs"]
    convolution = rows[f"{LAYER}_conv"]
    assert convolution["flops_per_second"] == pytest.approx(convolution["flops"] / convolution["ms"] * 1e3)
    assert rows["rnnt_encoder"]["of_limit"] > 0


def test_flops_are_of_the_label_that_runs_and_not_of_a_module_s_name(twelve, rows):
    """The projections of the simple loss are modules below the joiner, which is not running when they are called."""
    batch = json.loads((twelve[1] / "profile.json").read_text())[0]["batches"][0]
    frames, tokens = batch["N"] * batch["T_max"], batch["N"] * (batch["U_max"] + 1)
    joined = 5 * frames * SMALL["joiner_dim"] * SMALL["vocab_size"]
    assert rows["joiner"]["macs"] == joined and rows["joiner.backward"]["macs"] == 2 * joined
    to_joiner = (frames * SMALL["encoder_dim"] + tokens * SMALL["decoder_dim"]) * SMALL["joiner_dim"]
    simple = (frames * SMALL["encoder_dim"] + tokens * SMALL["decoder_dim"]) * SMALL["vocab_size"]
    assert rows["other"]["macs"] == 3 * (to_joiner + simple)
    assert json.loads((twelve[1] / "profile.json").read_text())[0]["not_counted"] == []


def test_what_is_written(twelve, rows):
    printed, folder = twelve
    assert (folder / "profile-filtered.txt").read_text() == printed
    assert "labels' own cost" in printed and "aten::" not in printed
    operators = (folder / "profile.txt").read_text().partition("Self CPU %")[2]
    labels = {line.split()[0] for line in operators.splitlines() if line.strip().startswith("rnnt_")}
    ten = CLASSIC - {"joiner"}
    assert "aten::" in operators and ten | {f"{label}.backward" for label in ten} <= labels
    with (folder / "profile.csv").open() as stream:
        assert [row["name"] for row in csv.DictReader(stream)] == list(rows)
    names = "".join(path.read_text() for path in folder.glob("*.pt.trace.json"))
    assert all(f'"{label}.backward"' in names for label in CLASSIC)
    assert "profile-time-" in (folder / "profile.html").read_text()
    page = folder / "all.html"
    done = run("rnnt-bench", "report", folder.parent, "--output", page)
    assert done.returncode == 0 and "profile-time-" in page.read_text(), done.stderr


def made_up(log, limits=None, **steps):
    """The profile that the fixture writes, with a limit, and with more about its steps."""
    write_profile(log)
    document = json.loads((log / "profile-2" / "profile.json").read_text())[0]
    document["limits"] = limits
    document["steps"].update(steps)
    return profile(documents.typed(document, Profile))


def limited(ns, flags=()):
    """A limits record whose best product is 2 FLOPs in so many nanoseconds."""
    return {"record": "limits", "products": [{"n": 1, "ns": [ns]}], "flags": list(flags), "foreign_cpu": 0.9}


def test_a_share_above_the_limit_is_never_printed(tmp_path):
    """The fixture's labels do 2,000 FLOPs in 1 to 5 ms, 0.4 to 2 MFLOP/s."""
    right = made_up(tmp_path, limited(1.0))
    assert ">100%" not in tables.text(right) and "limit is wrong" not in tables.text(right)
    wrong = made_up(tmp_path, limited(3e6, ["busy"]))
    shown = [row[-1].shown for row in tables.labels(wrong).rows]
    assert ">100%" in shown and not any(
        float(share.rstrip("%")) > 100 for share in shown if share not in (">100%", "-")
    )
    (line,) = [line for line in tables.lines(wrong) if "100%" in line]
    assert "beside other load" in line and "encoder.backward" in line


def test_steps_beside_other_load_are_said_to_be(tmp_path):
    quiet, busy = made_up(tmp_path), made_up(tmp_path, foreign_cpu=0.45, flags=["busy", "loaded"])
    assert "other load" not in tables.text(quiet)
    assert "45.0% of the CPUs" in tables.text(busy) and "other load" in tables.lines(busy)[-1]


def test_the_machine_is_named_with_its_node_only_on_a_cluster(tmp_path):
    here = made_up(tmp_path)
    assert "made up, 2 threads" in tables.text(here)
    here.document.node = "node-1, GPU 0"
    assert "made up of node-1, GPU 0, 2 threads" in tables.text(here)


def test_the_labels_cost_is_not_negative(tmp_path):
    slower = made_up(tmp_path, bare_ns=[3e7, 3e7])
    assert slower.hooks_ms < 0 and "-" not in tables.text(slower).partition("labels' own cost:")[2].splitlines()[0]


def test_the_last_line_is_the_verdict(tmp_path):
    """A step is 20.5 ms; the loss has 2 x 1.05 of it, the encoder 2 x 5.25."""
    *_, last = tables.lines(made_up(tmp_path))
    assert last == "VERDICT: loss: 10.2% of a step; encoder: 51.2%"


def test_load_beside_the_steps_is_measured(twelve):
    steps = json.loads((twelve[1] / "profile.json").read_text())[0]["steps"]
    assert 0 <= steps["foreign_cpu"] <= 1 and isinstance(steps["flags"], list)
    assert "VERDICT: decoder, joiner and loss: " in twelve[0]


def test_boxes_lie_in_the_box_above(twelve):
    kept = profile(documents.read(twelve[1] / "profile.json", List[Profile])[0])
    for figure in figures(kept):
        boxes = [
            (-y, base, base + width)
            for trace in figure.data
            for y, base, width in zip(trace["y"], trace["base"], trace["x"])
        ]
        for level, begin, end in boxes:
            assert not level or any(
                up == level - 1 and low <= begin + 1e-9 and end <= high + 1e-9 for up, low, high in boxes
            )
    assert tables.sweep([("a", kept, ""), ("b", None, "out of memory in x")]).rows[1][-1].shown.startswith("out of")


@pytest.mark.parametrize(
    "flags", [("--loss", "torchaudio", "--amp", "bfloat16", "--dropout"), ("--loss", "fused:torch")]
)
def test_an_exact_loss(of_features, tmp_path, flags):
    done = profiled(tmp_path, of_features, *flags)
    assert done.returncode == 0, done.stderr
    labels = {row["label"] for row in rows_in(tmp_path / "profile-1").values()}
    assert "rnnt_loss" in labels and ("joiner" in labels) == ("torchaudio" in flags)


def test_checkpoints_count_a_forward_again(of_features, tmp_path, rows):
    layers = "encoder.conformer.conformer_layers.*"
    done = profiled(tmp_path, of_features, "--batch-size", 2, "--checkpoint", layers, layers=12)
    assert done.returncode == 0, done.stderr
    kept = rows_in(tmp_path / "profile-2")
    attention = f"{LAYER}_self_attn"
    assert kept[f"{attention}.backward"]["macs"] == rows[attention]["macs"] + rows[f"{attention}.backward"]["macs"]
    assert kept["rnnt_encoder_embed.backward"]["macs"] == rows["rnnt_encoder_embed.backward"]["macs"]
    assert kept["rnnt_encoder"]["left_mb"] < rows["rnnt_encoder"]["left_mb"]


def test_icefall_s_model_by_its_name(of_features, tmp_path):
    """Relative positions are a product of 2T - 1 of them for each query beside that of T keys, and its projection."""
    done = profiled(tmp_path, of_features, "--config", "icefall", "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    assert "icefall's Conformer transducer" in done.stdout
    rows = rows_in(tmp_path / "profile-2")
    assert {row["label"] for row in rows.values()} - {"other", "step"} == CLASSIC
    (document,) = json.loads((tmp_path / "profile-2" / "profile.json").read_text())
    N, T, E = document["batches"][0]["N"], document["batches"][0]["T_max"], SMALL["encoder_dim"]
    of_layer = 4 * N * T * E**2 + (2 * T - 1) * E**2 + N * T * E * (T + 2 * T - 1 + T)
    assert rows[f"{LAYER}_self_attn"]["macs"] == SMALL["layers"] * of_layer
    assert document["not_counted"] == [] and document["config"] == "icefall"
    both = profiled(tmp_path / "both", of_features, "--config", "icefall", "--model", "x.py:X")
    assert_user_error(both, "--config icefall", "--model")


def test_a_model_by_import_path_and_a_size_that_does_not_fit(of_features, tmp_path):
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    model = (f"--model={tmp_path}/models.py:Whole", "--loss=torchaudio", "--size=vocab_size=11", "--limits=false")
    flags = ("--log-dir", tmp_path, "--shape-file", of_features, *model, "--steps", 1)
    fits = command(*flags)
    assert fits.returncode == 0, fits.stderr
    assert "front.backward" in fits.stdout and "rnnt_loss.backward" in fits.stdout
    large = (*flags, "--arg", f"wanted={2**50}", "--label", "all=model")
    line = command(*large)
    assert line.returncode == 2 and "out of memory in all (model), forward" in line.stderr
    swept = command(*large, "--sweep=batch-size=1,2")
    assert swept.returncode == 1 and swept.stdout.count("out of memory in all (model), forward") == 2


@pytest.fixture
def whole(of_features, tmp_path):
    """The command on the model of MODELS, at the size of a test."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    model = (f"--model={tmp_path}/models.py:Whole", "--loss=torchaudio", "--size=vocab_size=11", "--limits=false")
    quick = ("--steps", 1, "--warmup", 0, "--trace-steps", 1, "--threads", 1)
    return lambda *flags: command("--log-dir", tmp_path, "--shape-file", of_features, *model, *quick, *flags)


def test_amp_and_dropout_are_what_the_model_sees(whole):
    """The model itself raises what it did not expect."""
    assert whole("--amp", "bfloat16", "--arg", "expected=bfloat16").returncode == 0
    assert "no bfloat16" in whole("--arg", "expected=bfloat16").stderr
    assert whole("--no-dropout", "--arg", "still=true").returncode == 0
    assert "dropout" in whole("--dropout", "--arg", "still=true").stderr


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch 2.0 or newer compiles")
def test_what_is_compiled_is_compiled_before_the_steps(whole, tmp_path, monkeypatch):
    """By a backend that makes no machine code, which takes a minute; then one that raises."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend="aot_eager"))
    done = whole("--compile", "--label", "front=model.front", "--sweep", "batch-size=1,2")
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "profile-sweep-batch-size" / "profile.json").read_text())
    for cell in cells:
        made = cell["compiled"]
        assert made["graphs"] >= 1 and made["modules"] >= 1 and made["graphs_later"] == 0
        assert {row["name"] for row in cell["rows"]} >= {"front", "front.backward"}
    assert done.stdout.count("compiled before the steps") == 2 and done.stderr.count("compiling ") == 2

    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend=broken))
    done = whole("--compile", "--label", "front=model.front")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "front (model.front), forward" in last and "no compiler here" in last


def test_a_sweep_has_a_row_for_each_size(whole, tmp_path):
    done = whole("--sweep", "batch-size=1,3", "--optimizer")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "profile-sweep-batch-size"
    cells = json.loads((folder / "profile.json").read_text())
    steps = [{row["name"]: row for row in cell["rows"]}["step"] for cell in cells]
    frames = [cell["batches"][0] for cell in cells]
    # all of it is work on frames and tokens, padded: more of both is more of it, and the optimizer's stays
    assert steps[0]["macs"] < steps[1]["macs"] and [frame["N"] for frame in frames] == [1, 3]
    updates = [{row["name"]: row for row in cell["rows"]}["optimizer"]["flops"] for cell in cells]
    assert updates[0] == updates[1] > 0
    with (folder / "profile.csv").open() as stream:
        assert {row["size"] for row in csv.DictReader(stream)} == {"batch-size 1", "batch-size 3"}
    lines = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [(line[1], line[2], line[-1]) for line in lines] == [
        (str(size), str(frame["frames"]), "ok") for size, frame in zip((1, 3), frames)
    ]
    assert (folder / "profile.txt").read_text().count("Self CPU time total") == 2


def test_a_killed_sweep_resumes(of_features, tmp_path):
    """kill -9 in the second size: the first is not profiled again."""
    source = MODELS.replace(
        "torch.empty(", f"len(features) > 1 and kill_the_command('{tmp_path}/told') or torch.empty("
    )
    (tmp_path / "own.py").write_text(source + KILLS)
    model = (f"--model={tmp_path}/own.py:Whole", "--loss=torchaudio", "--size=vocab_size=11", "--limits=false")
    quick = ("--steps", 1, "--warmup", 0, "--trace-steps", 1, "--threads", 1, "--sweep", "batch-size=1,2")
    flags = (*model, *quick, "--shape-file", of_features, "--log-dir", tmp_path / "log")
    assert_user_error(run("profile_model.py", *flags, "--resume"), "--resume")
    assert run("profile_model.py", *flags).returncode == -9
    kept = tmp_path / "log" / "profile-sweep-batch-size" / "profile.json"
    (before,) = json.loads(kept.read_text())
    done = run("profile_model.py", *flags, "--resume")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(kept.read_text())
    assert first == before and second["size"] == "batch-size 2" and second["rows"]
    assert done.stdout.count("labels' own cost") == 2 and len(list((tmp_path / "log").iterdir())) == 1
    assert_user_error(run("profile_model.py", *flags, "--resume", "--seed", 1), "--resume")


def test_a_mistake_in_a_later_size_keeps_what_was_measured(whole, tmp_path):
    done = whole("--sort-utterance", "true", "--sweep", "max-frames=2000,1")
    assert done.returncode == 2 and "--max-frames 1" in done.stderr.splitlines()[-1]
    (cell,) = json.loads((tmp_path / "profile-sweep-max-frames" / "profile.json").read_text())
    assert "max-frames 2000" in done.stdout and cell["rows"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "no.such:thing"), ["no.such"]),
        (("--label", "x=encoder.layer.*"), ["--label x=encoder.layer.*", "encoder.conformer"]),
        (("--checkpoint", "nothing"), ["--checkpoint nothing"]),
        (("--size", "layer=3"), ["layer", "'layers'"]),
        (("--sweep", "seed=1,2"), ["batch-size"]),
        (("--arg", "x=1"), ["--arg", "--model"]),
        (("--max-frames", 1), ["--max-frames 1", "--sort-utterance true"]),
        (("--batch-size", 2, "--sort-utterance", "true"), ["--batch-size 2", "--sort-utterance false"]),
        (("--sort-utterance", "true", "--max-frames", 1), ["--max-frames 1", "at least"]),
    ],
)
def test_bad_input_is_one_line(of_features, tmp_path, flags, words):
    done = profiled(tmp_path, of_features, *flags)
    first, _, last = done.stderr.rpartition("profile_model.py: error:")
    assert first == "" or first.startswith("profiling ") and first.count("\n") == 1
    done.stderr = "profile_model.py: error:" + last
    assert_user_error(done, *words)
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_of_a_config_names_the_nearest(of_features, tmp_path):
    config = tmp_path / "sizes.yaml"
    config.write_text("encoder_dims: 4\n", encoding="utf-8")
    done = run("profile_model.py", "--config", config, "--shape-file", of_features, "--log-dir", tmp_path / "log")
    assert_user_error(done, config, "encoder_dims", "'encoder_dim'")


def test_the_documentation_shows_what_the_command_draws():
    text = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    assert "rnnt_encoder_layer.backward" in text

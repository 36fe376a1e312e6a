"""rnnt-bench profile: the model's parameters, the labels, what adds up, and the command."""

from __future__ import annotations

import functools
import itertools
import runpy

import pytest
import torch
from rnnt_bench.core.errors import UserError
from rnnt_bench.tools.kept import read
from rnnt_bench.tools.profile import command as cli
from rnnt_bench.tools.profile import labels as labelling
from rnnt_bench.tools.profile import rows
from rnnt_bench.tools.sizes import Sizes
from torch import nn

from commands import ROOT, run
from fixtures_model_runs import command, write_profile

icefall = runpy.run_path(str(ROOT / "examples" / "icefall.py"))
SMALL = dict(encoder_dim=16, decoder_dim=12, joiner_dim=14, heads=2, feed_forward=24, kernel=5, layers=2, vocab_size=11)
LAYER = "rnnt_encoder_layer"
IN_LAYER = {LAYER, *(f"{LAYER}_{part}" for part in ("feed_forward_macaron", "self_attn", "conv", "feed_forward"))}
OTHERS = {"rnnt_encoder", "rnnt_encoder_embed", "rnnt_decoder", "rnnt_loss_simple", "rnnt_loss_pruned", "joiner"}
CLASSIC = IN_LAYER | OTHERS

MODELS = """
import torch
from torch import nn

class Whole(nn.Module):
    def __init__(self, vocab_size=11, wanted=1, expected="", still=False, scale=1):
        super().__init__()
        self.scale = scale
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
        return float(self.scale) * self.out(torch.tanh(frames[:, :, None] + tokens[:, None])), (lengths + 3) // 4
"""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A shape file of feature frames, as generate_shape_info.py --features writes it."""
    folder = tmp_path_factory.mktemp("shapes")
    torch.save(torch.tensor([[60 + 9 * i, 6 + i] for i in range(6)], dtype=torch.int32), folder / "shapes.features.pt")
    (folder / "shapes.features.json").write_text('{"options": {"subsampling_factor": 1}}', encoding="utf-8")
    return folder / "shapes.features.pt"


QUICK = ("--device", "cpu", "--threads", 1, "--warmup", 0, "--trace-steps", 1, "--steps", 1)


def profiled(log, shapes, *flags, layers=2, code=0):
    """Run the command in this process; return (rows by name of the last size, the job's value) of its last run."""
    of = {"embed_channels": "[2,2,4]", **SMALL, "layers": layers}
    sizes = [f"--size={key}={value}" for key, value in of.items()]
    words = ("--log-dir", log, "--shape-file", shapes, *QUICK, *([] if "--model" in flags else sizes), *flags)
    assert command(cli, *words) == code
    path = max(log.glob("*/tool.jsonl"), key=lambda path: path.stat().st_mtime)
    kept = read(path)
    (*_, last) = kept.jobs.values()
    return {row["name"]: row for row in rows.answer(kept).rows}, last.values[0] if last.values else None


@pytest.fixture(scope="module")
def twelve(tmp_path_factory, shapes):
    """(rows, what was measured, the log folder) of 12 layers and 8 steps."""
    log = tmp_path_factory.mktemp("log")
    return *profiled(log, shapes, "--steps", 8, "--batch-size", 2, "--optimizer", layers=12), log


def parameters(config, shapes, log):
    """The numbers of parameters of the model and each part of icefall's, as a profile of the full size keeps them."""
    flags = ("--config", "icefall") if config else ()
    words = (*QUICK, "--log-dir", log, "--shape-file", shapes, "--format", "json", "--quiet", *flags)
    assert command(cli, *words) == 0
    (job,) = read(next(log.glob("*/tool.jsonl"))).jobs.values()
    return job.values[0]["parameters"]


def test_parameters_are_icefall_s_and_differ_by_what_is_known(shapes, tmp_path, capsys):
    """A layer has no relative positions (263,168), no scales and eps (22), and six affine norms (6,144)."""
    published = {"model": 78_648_040, "encoder": 77_096_192, "embed": 1_285_112, "layer": 6_317_590}
    published.update(decoder=257_026, joiner=781_818, simple_am_proj=256_502, simple_lm_proj=256_502)
    counts = parameters("", shapes, tmp_path / "default")
    assert parameters("icefall", shapes, tmp_path / "icefall") == published
    changes = {"layer": -263_168 - 22 + 6_144, "embed": -8 + 1_024, "decoder": -2, "joiner": -6, "simple_am_proj": -2}
    assert {key: counts[key] - published[key] for key in changes} == changes
    assert counts["encoder"] == counts["embed"] + 12 * counts["layer"] and counts["model"] == 75_564_492


def test_relative_attention_is_that_of_transformer_xl():
    """Row by row: (q_i + u) k_j + (q_i + v) W p(i - j), over the root of the head's size."""
    torch.manual_seed(1)
    of = Sizes(encoder_dim=8, heads=2, dropout=0.0)
    attention, (x, table) = icefall["RelativeAttention"](of), icefall["Positions"](of)(torch.randn(1, 5, 8))
    query, key, value = attention.in_proj(x[0]).chunk(3, dim=-1)
    expected = torch.empty(5, 8)
    for head, i in itertools.product(range(2), range(5)):
        part = slice(head * 4, (head + 1) * 4)
        # the last two keys are padding
        at = torch.tensor([[(i - j) * 10000 ** (-k / 8) for k in range(0, 8, 2)] for j in range(3)])
        projected = attention.linear_pos(torch.stack([at.sin(), at.cos()], dim=2).flatten(1))[:, part]
        q, u, v = query[i, part] / 2, attention.content_bias[head], attention.position_bias[head]
        expected[i, part] = (key[:3, part] @ (q + u) + projected @ (q + v)).softmax(0) @ value[:3, part]
    result = attention(x.transpose(0, 1), table, torch.arange(5)[None] >= 3)[:, 0]
    torch.testing.assert_close(result, attention.out_proj(expected), rtol=1e-4, atol=1e-5)


def test_double_swish_and_balancer_have_the_published_gradients():
    x = torch.tensor([[-1.0, 0.3], [0.2, 0.4], [0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(icefall["DoubleSwish"](), x)
    balanced = icefall["Balancer"](positive=(0.05, 0.9), magnitude=(0.5, 100.0))(x)
    assert torch.equal(balanced, x)
    balanced.backward(torch.ones_like(x))
    # column 0: two of three positive, mean magnitude 1.3 / 3 too small; column 1: all positive, 0.1 over its most
    small = torch.tensor([0.01, -0.01, -0.01], dtype=torch.float64)
    many = torch.full((3,), 0.01, dtype=torch.float64)
    torch.testing.assert_close(x.grad, 1 + torch.stack([small, many], dim=1))


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
    spans = labelling.Spans(itertools.count().__next__)
    with labelling.Labels(model, paths, spans) as labels:
        run()
        labels.end_backward()
    return {place: sum(not reading.is_recomputed for reading in readings) for place, readings in spans.calls.items()}


def test_labels_change_no_gradient_and_leave_no_hook():
    torch.manual_seed(0)
    model, symbols = Twice(), torch.tensor([[1, 2, 3]])
    model(symbols).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    paths = {"embed": "embed", "layer": "layer", "attention": "attention"}
    taken = labelled(model, paths, lambda: model(symbols).backward())
    assert all(torch.equal(parameter.grad, right) for parameter, right in zip(model.parameters(), wanted))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert taken == {((name,), phase): 1 + (name == "layer") for name in paths for phase in ("forward", "backward")}


def test_a_forward_that_a_checkpoint_computes_again_is_of_the_backward():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    taken = labelled(
        model,
        {"0": "layer"},
        lambda: torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=False).sum().backward(),
    )
    calls = {(len(chain), phase): count for (chain, phase), count in taken.items()}
    assert calls == {(1, "forward"): 1, (1, "backward"): 1, (2, "backward"): 0}  # the second forward, in the backward


def test_patterns_are_of_whole_names():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])})
    assert labelling.by_patterns(model, {"x": ("layers.*",)}) == {"layers.0": "x", "layers.1": "x"}
    assert labelling.by_depth(model, 2) == {"layers.0": "layers.*", "layers.1": "layers.*"}
    with pytest.raises(UserError, match=r"layers\.\*"):
        labelling.by_patterns(model, {"x": ("layer.*",)})


def test_twelve_layers_and_eight_steps_are_96_calls_and_times_add_up(twelve):
    parts, _, _ = twelve
    assert {row["label"] for row in parts.values()} - {"optimizer", "other", "step"} == CLASSIC
    calls = {name: parts[name]["calls"] for label in CLASSIC for name in (label, f"{label}.backward")}
    assert calls == {name: 96 if name.partition(".")[0] in IN_LAYER else 8 for name in calls}
    assert sum(row["own_ms"] for row in parts.values()) == pytest.approx(parts["step"]["ms"])
    assert all(0 <= row["own_ms"] <= row["ms"] + 1e-9 for row in parts.values() if row["name"] != "step")
    assert parts["step"]["share"] == 1 and parts["step"]["ms"] == parts["step"]["host_ms"]
    assert parts[f"{LAYER}_conv"]["ms_per_call"] == pytest.approx(parts[f"{LAYER}_conv"]["ms"] / 12)
    assert max(row["peak_mb"] or 0 for row in parts.values()) == parts["step"]["peak_mb"] > 0
    assert parts["rnnt_encoder"]["left_mb"] >= parts[LAYER]["left_mb"] > 0 and abs(parts["step"]["left_mb"]) < 0.01


def test_flops_are_of_the_label_that_runs_and_not_of_a_module_s_name(twelve):
    """A feed-forward has two products, each of 16 x 24 weights, for every frame with its padding, in 12 layers.  As in
    icefall's profile, the simple loss has its projections, modules below the joiner, and the pruned one the joiner."""
    parts, found, _ = twelve
    (batch,) = found["batches"]
    frames, tokens = batch["N"] * batch["T_max"], batch["N"] * (batch["U_max"] + 1)
    joined = 5 * frames * SMALL["joiner_dim"] * SMALL["vocab_size"]
    inputs = frames * SMALL["encoder_dim"] + tokens * SMALL["decoder_dim"]
    of = {f"{LAYER}_feed_forward": 2 * frames * 16 * 24 * 12, "joiner": joined, "rnnt_loss_pruned": joined}
    of.update({f"{name}.backward": 2 * macs for name, macs in of.items()}, other=3 * inputs * SMALL["joiner_dim"])
    normalisers = frames * (batch["U_max"] + 2)  # products of exponentials: each cell, and a mean decoder output
    of["rnnt_loss_simple"] = (inputs + normalisers) * SMALL["vocab_size"]
    assert {name: parts[name]["macs"] for name in of} == of
    outer = [row["macs"] for row in parts.values() if row["depth"] == 0 and row["label"] != "step"]
    assert sum(outer) == parts["step"]["macs"] and found["not_counted"] == [] and parts["optimizer"]["flops"] > 0
    assert parts["joiner"]["flops_per_second"] == pytest.approx(parts["joiner"]["flops"] / parts["joiner"]["ms"] * 1e3)


def test_what_is_kept_and_shown(twelve):
    parts, found, log = twelve
    folder = log / "profile-2" / "batch-size-2"
    traces = "".join(path.read_text() for path in folder.glob("*.pt.trace.json"))
    assert all(f'"{label}.backward"' in traces for label in CLASSIC)
    assert "aten::" in (folder / "batch-size-2.txt").read_text()
    run("rnnt-bench", "report", log, "--output", log / "all.html")
    text = run("summarize.py", log).stdout
    assert text.startswith("batch-size 2: a step: ") and "VERDICT: decoder and loss: " in text
    assert "profile-time-" in (log / "all.html").read_text()
    (figure,) = rows.answer(read(log / "profile-2" / "tool.jsonl")).figures
    drawn = [ms for bars in figure.data for ms in bars["x"]]
    assert 0 <= found["foreign_cpu"] <= 1 and sum(drawn) == pytest.approx(parts["step"]["ms"])


def test_lines_below_the_table_tell_what_not_to_trust(tmp_path):
    """A step is 20.5 ms; the loss has 2 x 1.05 of it, the encoder 2 x 5.25."""

    def made_up(log, **changes):
        return rows.answer(read(write_profile(log, **changes))).render("table")

    right = made_up(tmp_path)
    assert "VERDICT: loss: 10.2% of a step; encoder: 51.2%" in right and "other load" not in right
    busy = made_up(tmp_path, foreign_cpu=0.45, flags=["busy", "loaded"])
    assert "45.0% of the CPUs" in busy and "; measured beside other load" in busy
    slower = made_up(tmp_path, bare_ns=[3e7, 3e7]).partition("labels' own cost:")[2]
    assert "-" not in slower.splitlines()[0]
    assert "batch-size 4: oom: out of memory in encoder" in right and "not counted in FLOPs: aten::sort" in right


@pytest.mark.parametrize("loss", ["torchaudio", "fused:torch"])
def test_an_exact_loss(loss, shapes, tmp_path):
    parts, _ = profiled(tmp_path, shapes, "--loss", loss, "--amp", "bfloat16", "--dropout")
    assert "rnnt_loss" in parts and ("joiner" in parts) == (loss == "torchaudio")


def test_icefall_s_model_by_its_name(shapes, tmp_path):
    """Relative positions are a product of 2T - 1 of them for each query beside that of T keys, and its projection."""
    parts, found = profiled(tmp_path, shapes, "--config", "icefall", "--batch-size", 2)
    assert {row["label"] for row in parts.values()} - {"other", "step"} == CLASSIC and found["not_counted"] == []
    (batch,), E = found["batches"], SMALL["encoder_dim"]
    N, T = batch["N"], batch["T_max"]
    of_layer = 4 * N * T * E**2 + (2 * T - 1) * E**2 + N * T * E * (T + 2 * T - 1 + T)
    assert parts[f"{LAYER}_self_attn"]["macs"] == SMALL["layers"] * of_layer


def test_a_model_by_import_path_sees_amp_and_dropout_and_may_not_fit(shapes, tmp_path, capsys):
    """The model itself raises what it did not expect."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    model = ("--model", f"{tmp_path}/models.py:Whole", "--loss=torchaudio", "--size=vocab_size=11")
    for flags, code, words in (
        ((), 0, "front.backward"),
        (("--arg=expected=bfloat16", "--amp=bfloat16"), 0, "rnnt_loss.backward"),
        (("--arg=expected=bfloat16",), 2, "no bfloat16"),
        (("--arg=still=true", "--no-dropout"), 0, "front"),
        (("--arg=still=true", "--dropout"), 2, "dropout"),
        (("--arg=scale=nan",), 1, "wrong result: the loss of a step is nan"),
        (("--label=begin=front", "--label=end=o*"), 0, "end.backward"),  # names as --depth shows them
        ((f"--arg=wanted={2**50}", "--label=end=out"), 1, "oom: out of memory in the step"),
    ):
        profiled(tmp_path / "log", shapes, *model, *flags, code=code)
        printed = capsys.readouterr()
        assert words in printed.out + printed.err


@pytest.mark.parametrize(
    ("front", "label", "place"),
    [
        ("nn.Sequential(nn.Linear(80, 8), nn.ReLU(inplace=True))", "front.*", "x (model.front.1), forward"),
        ("nn.Sequential(nn.Linear(80, 8), nn.ReLU(inplace=True))", "front.0", "model.front.1"),
        ("nn.Linear(80, 8)", "front", "+="),
    ],
)
def test_a_layer_that_writes_over_a_labelled_tensor_is_refused_by_name(front, label, place, shapes, tmp_path, capsys):
    changed = {"nn.Linear(80, 8)": front, "        return float": "        frames += 1\n        return float"}
    changed["features[:, ::4]),"] = "features)[:, ::4],"
    models = functools.reduce(lambda text, item: text.replace(*item), changed.items(), MODELS)
    (tmp_path / "models.py").write_text(models, encoding="utf-8")
    model = ("--model", f"{tmp_path}/models.py:Whole", "--loss=torchaudio", "--size=vocab_size=11")
    assert command(cli, *QUICK, "--log-dir", tmp_path, "--shape-file", shapes, *model, "--label", f"x={label}") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert place in line and "--label" in line and "view" not in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"layers": 12, "sizes": ["batch-size 1"], "steps": 5}),
        (["--preset", "quick", "--steps", 4, "--size", "layers=3"], {"layers": 3, "steps": 4}),
        (["--preset", "quick", "--sort-utterance", "true"], {"sizes": ["max-frames 1000"]}),
        (["--preset", "quick", "--model", "x:Y"], {"layers": 12}),
    ],
)
def test_a_quick_profile_is_of_a_small_model(words, expected, monkeypatch):
    planned = []
    monkeypatch.setattr(cli.commands, "measured", lambda tool, name, config, *_: planned.append(config))
    command(cli, "--device", "cpu", *words)
    (config,) = planned
    known = {"layers": config.choice.sizes.layers, "sizes": [*config.sizes]}
    assert {**known, "steps": config.choice.steps}.items() >= expected.items()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "no.such:thing"), ["no.such"]),
        (("--label", "x=encoder.layer.*"), ["--label x=encoder.layer.*", "encoder.conformer"]),
        (("--label", "a=encoder", "--depth", 2), ["--label or --depth"]),
        (("--sort-utterance", "true", "--max-frames", 1), ["--max-frames 1", "utterance of 69"]),
        (("--max-frames", 10), ["--max-frames 10", "--sort-utterance true"]),
        (("--config", "icefall", "--model", "x.py:X"), ["--config icefall", "--model"]),
        (("--arg", "x=1"), ["--arg", "--model"]),
        (("--model", "x.py:X", "--arg", "x=.nan"), ["--arg x", "finite"]),
        (("--loss", "nothing"), ["nothing"]),
        (("--loss", "k2-pruned"), ["k2-pruned", "torch 2.1", "--loss fast_rnnt-pruned"]),
        (("--loss", "k2"), ["k2", "torch 2.1", "--loss fast_rnnt"]),
        (("--loss", "nemo"), ["nemo", "--loss fast_rnnt"]),
        (("--loss", "fast_rnnt@k2"), ["fast_rnnt@k2", "--loss fast_rnnt"]),
        (("--size", "encoder_dims=4"), ["encoder_dims", "'encoder_dim'"]),
        (("--size", "layers=0"), ["layers", ">= 1"]),
        (("--size", "heads=5"), ["encoder_dim", "multiple"]),
        (("--size", "kernel=4"), ["kernel", "odd"]),
        (("--resume",), ["--resume"]),
    ],
)
def test_a_mistake_is_a_line(flags, words, shapes, tmp_path, capsys):
    small = ("--size", "layers=1") if "--size" not in flags else ()
    assert command(cli, *QUICK, "--log-dir", tmp_path, "--shape-file", shapes, *flags, *small) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words), last

"""Peaky logits: the same bits everywhere, sharp along their alignment by the margin, and one loss for all."""

from __future__ import annotations

import copy
import hashlib
import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import assert_user_error, has_words, rows_of, run
from fixtures_runs import correctness as correctness_records
from fixtures_runs import write_run
from test_contract import is_left_out

from common.analysis import logs
from common.core import settings
from common.core.errors import NotRunnable, UserError
from common.core.implementations import IMPLEMENTATIONS, with_variants
from common.data import streams
from common.losses import inputs, oracle, peaky, step
from common.losses.context import Context
from common.losses.joiner import Joiner
from common.losses.layouts import table
from common.losses.passes import answers, correctness

everywhere = pytest.mark.environment_contract

CPU = torch.device("cpu")
SHAPES = [(60, 20), (45, 0), (12, 12), (1, 1)]
#: Of everything below, made once; each environment has to make the same.
DIGEST = "b0597119e4a42afc1aa591d8bba701f3ee3993a3bee02c54238ddc1054904b70"


def chosen(**given):
    return settings.resolve({"logits": "peaky", "margin": 10.0, "vocab_size": 60, "encoder_dim": 64, **given}, "cpu")


def made(flags, shapes=SHAPES, dtype=torch.float32, key=0):
    """(model, batch)"""
    model = Joiner(inputs.output_layer(flags, flags.vocab_size, CPU, dtype), {})
    sizes = {"vocab_size": flags.vocab_size, "encoder_dim": flags.encoder_dim}
    source = inputs.source_of(flags)
    return model, inputs.make_batch(shapes, **sizes, device=CPU, dtype=dtype, key=(flags.seed, key), source=source)


@everywhere
def test_same_bits_in_every_environment():
    flags = chosen()
    model, batch = made(flags)
    am, lm = inputs.simple_projections(flags, CPU, torch.float32).values()
    state = hashlib.sha256()
    for tensor in (batch.encoder_out, batch.decoder_out, batch.targets, model.output.weight, model.output.bias):
        state.update(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
    for layer in (am, lm):
        state.update(layer.weight.detach().numpy().tobytes() + layer.bias.detach().numpy().tobytes())
    assert state.hexdigest() == DIGEST


def test_targets_are_those_of_random_logits():
    flags = chosen()
    other = made(replace(flags, logits="random"))[1]
    batch = made(flags)[1]
    assert torch.equal(batch.targets, other.targets) and batch.shapes == other.shapes
    assert not torch.equal(batch.encoder_out, other.encoder_out)


@pytest.mark.parametrize("V, D", [(2, 1), (13, 16), (17, 24), (50, 32), (500, 64), (500, 512)])
def test_codes_are_signs_that_differ_enough(V, D):
    codes = peaky.codes(V, D, 1)
    assert codes.shape == (V, D) and not codes[0].any() and set(np.unique(codes[1:])) <= {-1, 1}
    assert np.abs(codes[1:] @ codes[1:].T - D * np.eye(V - 1)).max() <= D / 3
    assert V < 100 or abs(codes[1:].mean()) < 0.01


def test_too_few_dimensions_for_the_vocabulary():
    with pytest.raises(UserError, match="8 dimensions .*17 codes.*--encoder-dim"):
        peaky.codes(17, 8, 1)


def test_alignments_by_hand():
    draws = np.array([0.5, 0.1, 0.9, 0.3, 0.0])
    assert peaky.alignment(4, 2, draws).tolist() == [1, 3]  # the frames of the two smallest of the first four
    assert peaky.alignment(4, 4, draws).tolist() == [0, 1, 2, 3]
    assert peaky.alignment(4, 0, draws).tolist() == []
    assert peaky.alignment(3, 7, draws).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert peaky.alignment(1, 3, draws).tolist() == [0, 0, 0]


def leads(flags, shapes):
    """By how much the right arc is above all others at each cell of the alignments, as (emissions, blanks).

    Left out: blanks before a target that the frame says (one that follows its like, which is emitted there).
    """
    model, batch = made(flags, shapes, torch.float64)
    N, T, _ = inputs.padded_sizes(shapes)
    draws = streams.uniform(N * T, streams.ALIGNMENT, flags.seed, 0).reshape(N, T)
    with torch.no_grad():
        logits = model.logits(batch)
    gaps_of = ([], [])
    for n, (T, U) in enumerate(shapes):
        targets, frames = batch.targets[n].tolist(), peaky.alignment(T, U, draws[n]).tolist()
        u = 0
        for t in range(T):
            here = []
            while u < U and frames[u] == t:
                here.append(targets[u])
                others = logits[n, t, u].clone()
                others[targets[u]] = -torch.inf
                gaps_of[0].append(float(logits[n, t, u, targets[u]] - others.max()))
                u += 1
            if u == U or targets[u] not in here:
                gaps_of[1].append(float(logits[n, t, u, 0] - logits[n, t, u, 1:].max()))
    return [np.array(values) for values in gaps_of]


@pytest.mark.parametrize("margin", [4.0, 10.0])
def test_the_right_arc_leads_by_the_margin(margin):
    emissions, blanks = leads(chosen(vocab_size=500, encoder_dim=512, margin=margin), [(150, 40), (130, 60)])
    assert len(emissions) == 100 and len(blanks) > 270
    assert emissions.mean() == pytest.approx(margin, rel=0.1) and emissions.min() > 0.8 * margin
    # frames that say nothing; a frame's own target just said is further behind
    assert np.median(blanks) == pytest.approx(margin, rel=0.1) and blanks.min() > 0.7 * margin


@pytest.mark.parametrize("sizes", [(50, 32), (17, 24), (30, 512)])
def test_small_sizes_keep_the_lead(sizes):
    emissions, blanks = leads(chosen(vocab_size=sizes[0], encoder_dim=sizes[1]), [(150, 40), (30, 45)])
    assert emissions.min() > 1 and blanks.min() > 1 and emissions.mean() > 8 and blanks.mean() > 8


def test_one_alignment_has_almost_all_of_the_probability():
    shapes = [(150, 40), (120, 25), (30, 0), (1, 1)]
    flags = chosen(vocab_size=500, encoder_dim=512)
    of = {}
    for kind in ("random", "peaky"):
        model, batch = made(replace(flags, logits=kind), shapes, torch.float64)
        with torch.no_grad():
            of[kind] = oracle.losses(model.logits(batch), batch.targets, batch.shapes)
    assert (of["peaky"] < 0.02).all() and (of["random"] > 5).all()
    wider = made(replace(flags, margin=20.0), shapes, torch.float64)
    with torch.no_grad():
        losses = oracle.losses(wider[0].logits(wider[1]), batch.targets, batch.shapes)
    assert (losses < of["peaky"] / 50).all()


def adapter_of(implementation, **given):
    flags = chosen(**{"vocab_size": 17, "encoder_dim": 24, **given})
    adapter = importlib.import_module(implementation.script).ADAPTER(flags, implementation.variant)
    try:
        adapter.load("cpu")
    except NotRunnable as reason:
        pytest.skip(f"{implementation.name}: {reason}")
    return adapter


def setting_of(adapter, shapes):
    _, batch = made(adapter.settings, shapes)
    return table.of(adapter).model(CPU, torch.float32), batch


@everywhere
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_all_implementations_agree_on_them(implementation, thorough):
    shapes = [(20, 7), (12, 9), (9, 2)]
    adapter = adapter_of(implementation, margin=2.0)  # a loss of some nats, so that relative errors mean something
    if is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    wide = adapter.widened(9)
    for scope in table.of(wide).scopes:
        loss_error, grad_error = answers.ANSWERS[scope](wide, *setting_of(adapter, shapes)).errors
        assert loss_error < 1e-4 and grad_error < 1e-4


@everywhere
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_a_loss_near_zero(implementation, thorough):
    shapes = [(20, 7), (12, 9), (9, 2)]
    adapter = adapter_of(implementation, margin=7.0)
    if is_left_out(adapter, thorough):
        pytest.skip("with --thorough")
    wide = adapter.widened(9)
    model, batch = setting_of(adapter, shapes)
    layout = table.of(wide)
    prepared = step.prepare(wide, model, batch, layout.scopes[0])
    if "loss" in layout.scopes:
        expected = layout.expected(prepared.given.detach().double(), batch).sum().item()
    else:
        double_batch = made(adapter.settings, shapes, torch.float64)[1]
        expected = layout.expected_step(copy.deepcopy(model).double(), double_batch).sum()
        expected = expected.item()
    try:
        loss = prepared.run().item()
    except RuntimeError as error:
        if "total scores computed from forward/backward passes are not equal" not in str(error):
            raise
        pytest.skip("optimized_transducer wants its two float32 sums within 1e-5 of each other: too much to ask here")
    assert loss == pytest.approx(expected, abs=1e-3)
    # other topologies have no arc for some steps of the alignment
    assert expected < 0.5 or adapter.topology != "regular"
    gradients = [gradient for gradient in prepared.gradients().values() if gradient is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


@everywhere
@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_every_row_is_given_peaky_logits(implementation):
    """The row's own loss of an utterance is a small part of what it is on random logits, in each scope.

    Durations stay random, and a sigmoid for blank gives the same logits other probabilities.
    """
    if adapter_of(implementation).topology in ("tdt", "hat"):
        pytest.skip("not all of its probabilities are peaky")
    for scope in table.of(adapter_of(implementation)).scopes:
        losses = {}
        for kind, margin in (("random", None), ("peaky", 7.0)):
            wide = adapter_of(implementation, logits=kind, margin=margin).widened(9)
            losses[kind] = step.prepare(wide, *setting_of(wide, [(30, 9)]), scope).forward().item()
        assert losses["peaky"] < losses["random"] / 4


def gaps(adapter, shapes):
    context = Context(adapter.settings, adapter, CPU, torch.float32, None, [np.array(shapes)], [0])
    return {kind: gap and gap.median for kind, gap in correctness.approximation_gaps(context).items()}


@everywhere
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i.kind == "pruned"], ids=lambda i: i.name)
def test_pruning_loses_little_of_a_peaky_loss(implementation):
    shapes = [(90, 30)]
    both = gaps(adapter_of(implementation), shapes)
    assert abs(both["peaky"]) < 1e-4 < 1e-3 < both["random"]
    random = {"logits": "random", "margin": None}
    of_default = gaps(adapter_of(implementation, margin=None), shapes)
    again = gaps(adapter_of(implementation, **random), shapes)
    assert all(again[kind] == pytest.approx(of_default[kind], rel=1e-6) for kind in ("random", "peaky"))
    assert again["trained"] is None  # too few symbols
    assert both["peaky"] < of_default["peaky"] < of_default["random"] == pytest.approx(both["random"])
    assert gaps(adapter_of(implementation, **random, encoder_dim=8), shapes)["peaky"] is None  # no codes
    assert gaps(adapter_of(implementation, margin=40.0), shapes)["peaky"] is None  # no loss


@everywhere
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i.kind == "pruned"], ids=lambda i: i.name)
def test_the_gap_is_that_of_all_measured_utterances(implementation):
    adapter, shapes = adapter_of(implementation, logits="random", margin=None), [[(60, 20), (30, 5)], [(40, 12)]]
    context = Context(adapter.settings, adapter, CPU, torch.float32, None, list(map(np.array, shapes)), [0, 1])
    gap = correctness.approximation_gaps(context)["random"]
    alone = [gaps(adapter, [shape])["random"] for shape in shapes[0]]
    assert gap.utterances == 3 and 0 < gap.lowest < gap.median < gap.highest
    assert gap.lowest == pytest.approx(min(alone), rel=1e-6) and max(alone) <= gap.highest * (1 + 1e-6)


def test_held_inputs_follow_their_targets():
    flags = chosen(vocab_size=13, encoder_dim=16, seed=1)
    held = Context(flags, None, CPU, torch.float32, None, [[(9, 3), (7, 4)], [(5, 2)]], [0, 1])
    held.hold_inputs([0, 1])
    model = Joiner(inputs.output_layer(flags, flags.vocab_size, CPU, torch.float32), {})
    for index in (0, 1):
        batch = held.make_batch(index, repeat=2)
        with torch.no_grad():
            losses = oracle.losses(model.logits(batch), batch.targets, batch.shapes)
        assert (losses < 0.2).all()


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match="--margin.*--logits peaky"):
        settings.resolve({"margin": 5.0}, "cpu")
    with pytest.raises(UserError, match="benchmark-2022"):
        chosen(pruned_recipe="benchmark-2022")


def note_of(folder, **record):
    write_run(folder, "k2-pruned", [correctness_records(**record)], exact=False)
    return logs.rows([folder])[0].notes[0]


def test_the_note_tells_the_gap_on_both(tmp_path):
    both = {"random": 0.00723, "peaky": -1.2e-8}
    words = note_of(tmp_path / "new", approximation_gap=0.00723, approximation_gaps=both)
    assert words.endswith("its loss is 7.2e-03 off the exact one on random logits, 1.2e-08 on peaky ones")
    words = note_of(tmp_path / "half", approximation_gap=0.00723, approximation_gaps={**both, "peaky": None})
    assert words.endswith("its loss is 7.2e-03 off the exact one on random logits")
    ends = {"random": {"median": 0.00723, "lowest": 0.0071, "highest": 0.039, "utterances": 4}}
    words = note_of(tmp_path / "range", approximation_gap=0.00723, approximation_gaps=both, gap_ranges=ends)
    assert has_words(words, "7.2e-03", "random", "7.1e-03 to 3.9e-02", "4 utterances", "1.2e-08")
    assert note_of(tmp_path / "old", approximation_gap=0.00723).endswith("its loss is 7.2e-03 off the exact one")


def test_end_to_end(tiny_shapes, tmp_path):
    pytest.importorskip("torchaudio")
    flags = ["--in-place", "--preset", "quick", "--scope", "step", "--passes", "trace", "--logits", "peaky"]
    flags += ["--shape-file", tiny_shapes, "--log-dir", tmp_path / "log"]
    done = run("benchmark_torchaudio.py", *flags, "--margin", "7")
    assert done.returncode == 0, done.stderr
    assert "peaky logits, margin 7, V 50" in " ".join(done.stdout.split())
    assert rows_of(tmp_path / "log")["torchaudio"]["average_step_time_us"] > 0
    assert_user_error(
        run("benchmark_torchaudio.py", *flags, "--encoder-dim", "8", "--quiet"), "8 dimensions", "--encoder-dim"
    )

"""The vectors that others run: ours are right, kernels with a fault are not, and they are made anew bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fused_transducer.sequence import mwer_loss
from rnnt_bench.core.implementations import LATTICES, imported
from rnnt_bench.losses import topologies
from rnnt_bench.losses.topologies import TOPOLOGIES

from commands import ROOT
from test_broken_losses import SMALL, Broken, OfFive

FOLDER = ROOT / "data" / "vectors"


check = imported(FOLDER / "check.py")


def expected_errors(losses, errors, utterance_of):
    """Return mwer_loss of each utterance (N,)."""
    rows = torch.tensor(utterance_of)
    parts = mwer_loss(losses, torch.tensor(errors), rows, reduction="none")
    return parts.new_zeros(int(rows.max()) + 1).index_add(0, rows, parts)


def answer(kernel, dtype, logits, targets, logit_lengths, target_lengths, blank, topology, upstream, **options):
    """Losses and gradient of a loss in torch."""
    of_rows = partial(expected_errors, **options) if topology == "mwer" else None
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    lattice = TOPOLOGIES["regular"] if of_rows else replace(TOPOLOGIES[topology], **values)
    leaf = torch.from_numpy(logits).to(dtype).requires_grad_()
    given = [torch.from_numpy(array) for array in (targets, logit_lengths, target_lengths)]
    losses = kernel(leaf, *given, blank=blank, reduction="none", topology=lattice)
    losses = of_rows(losses) if of_rows else losses
    (losses * torch.from_numpy(upstream).to(dtype))[losses.isfinite()].sum().backward()
    if leaf.dtype == torch.float64:
        logits[...] = leaf.detach().numpy()
    return losses.detach().numpy(), leaf.grad.numpy() if leaf.grad is not None else np.zeros_like(logits)


def of_joiner(backend, dtype, logits, targets, logit_lengths, target_lengths, blank, topology, upstream, **options):
    """Losses and gradient of fused_transducer, with logits as weights; a symbol at -inf has such a bias."""
    from fused_helpers import transducer_loss  # which keeps what is compiled

    given = {"delay_penalty": options.pop("penalty", 0.0), "backend": backend, "blank": blank, "activation": "relu"}
    lattice = replace(TOPOLOGIES[topology], window=options.pop("window")) if topology == "windowed" else None
    of_rows = partial(expected_errors, **options) if topology == "mwer" else None
    given.update({} if of_rows else options, reduction="none", negligible=0.0)
    given.update(topology="regular" if topology in ("delay-penalty", "windowed", "mwer") else topology)
    losses, gradient = [], np.zeros_like(logits)
    # each row by itself, or the hypotheses of an utterance with one encoder's row
    lists = [np.array(options["utterance_of"])] if of_rows else [np.array([0])] * len(logits)
    for first, utterance_of in enumerate(lists):
        some = slice(first, first + len(utterance_of))
        T, U = logit_lengths[some], target_lengths[some]
        m, t, u = np.indices((len(utterance_of), T.max(), U.max() + 1))
        m, t, u = np.nonzero((t < T[m]) & (u <= U[m]))
        cells = torch.from_numpy(logits[first + m, t, u]).to(dtype)
        impossible = cells.isinf().all(0)
        weight = cells.masked_fill(impossible, 0).t().contiguous().requires_grad_()
        bias = torch.zeros(len(weight), dtype=dtype).masked_fill_(impossible, -torch.inf)
        encoder_out = torch.zeros(utterance_of.max() + 1, T.max(), len(cells), dtype=dtype)
        decoder_out = torch.zeros(len(utterance_of), U.max() + 1, len(cells), dtype=dtype) - 1
        T_lengths = torch.zeros(len(encoder_out), dtype=torch.int64)
        T_lengths[utterance_of] = torch.from_numpy(T)
        encoder_out[utterance_of[m], t, range(len(cells))] = 1
        decoder_out[m, u, range(len(cells))] = 0
        integers = torch.from_numpy(targets[some, : U.max()]), T_lengths, torch.from_numpy(U)
        shared = {"utterance_of": torch.from_numpy(utterance_of)} if of_rows else {}
        if lattice:
            shared["window"] = lattice.windows(T_lengths, integers[2], integers[0].shape[1])
        made = transducer_loss(encoder_out, decoder_out, weight, bias, *integers, **given, **shared)
        made = of_rows(made) if of_rows else made
        (made * torch.from_numpy(upstream if of_rows else upstream[some]).to(dtype))[made.isfinite()].sum().backward()
        losses.append(made.detach().numpy())
        gradient[first + m, t, u] = weight.grad.t()
    return np.concatenate(losses), gradient


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_loss_is_right(backend, dtype):
    native = pytest.importorskip("fused_transducer.native")
    if backend == "native" and native.unavailable(torch.device("cpu"), dtype):
        pytest.skip(native.unavailable(torch.device("cpu"), dtype))
    assert check.check(partial(of_joiner, backend, dtype)) == []


def test_every_topology_has_its_cases_and_the_folder_is_small():
    names = {case["topology"] for case in check.cases()}
    assert names == {"regular", "mwer", *LATTICES} and sum(file.stat().st_size for file in FOLDER.iterdir()) < 2e6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_is_right(dtype):
    assert check.check(partial(answer, topologies.transducer_loss, dtype)) == []


#: Faults that need a factor of the loss, a second call, or more utterances or tokens than a vector has.
BEYOND = {"ClampsTheLastGradient", "UpstreamInHalf", "UpstreamInBfloat16", "LengthsByShape", "SharedBuffer"}
BEYOND |= {"TheFirstIsTheLongest", "ZeroFromU101", "ZeroFromU140"}
FAILING = [row for row in SMALL if row.__name__ not in BEYOND and row is not OfFive]


@pytest.mark.parametrize("kernel", [Broken, *FAILING], ids=lambda kernel: kernel.__name__)
def test_a_broken_kernel_fails_a_vector(kernel):
    assert bool(check.check(partial(answer, kernel(), torch.float64), "regular")) == (kernel is not Broken)


def test_they_are_made_anew_bit_for_bit(tmp_path):
    script = FOLDER / "make.py"  # as `make vectors` runs it, from any folder
    done = subprocess.run([sys.executable, script, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("values.npy", "index.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_checker_runs_alone(tmp_path):
    for name in ("check.py", "index.json", "values.npy"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "mine.py").write_text("def loss(logits, *given, **named):\n    return logits.sum((1, 2, 3)), logits\n")
    line = [sys.executable, "check.py", "mine:loss", "tdt"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "tdt durations without 0: loss" in done.stderr


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--help"], 0, "package.module:function"),
        (["json:loss"], 2, "no attribute 'loss'"),
        (["json:loads", "square"], 2, "tdt"),
    ],
)
def test_the_checker_says_how_it_is_called(words, code, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check.py", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        check.main()
    printed = capsys.readouterr()
    assert ended.value.code == code and message in printed.out + printed.err

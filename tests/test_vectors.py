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
from commands import ROOT
from test_broken_losses import SMALL, Broken, ClampsTheLastGradient, OfFive

from rnnt_bench.core.implementations import LATTICES, imported
from rnnt_bench.losses import topologies
from rnnt_bench.losses.topologies import TOPOLOGIES

FOLDER = ROOT / "data" / "vectors"


check, make = (imported(FOLDER / f"{name}.py") for name in ("check", "make"))


def answer(kernel, dtype, logits, targets, logit_lengths, target_lengths, blank, topology, upstream, **options):
    """Losses and gradient of a loss in torch."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    lattice = replace(TOPOLOGIES[topology], **values)
    leaf = torch.from_numpy(logits).to(dtype).requires_grad_()
    given = [torch.from_numpy(array) for array in (targets, logit_lengths, target_lengths)]
    losses = kernel(leaf, *given, blank=blank, reduction="none", topology=lattice)
    (losses * torch.from_numpy(upstream).to(dtype))[losses.isfinite()].sum().backward()
    if leaf.dtype == torch.float64:
        logits[...] = leaf.detach().numpy()
    return losses.detach().numpy(), leaf.grad.numpy() if leaf.grad is not None else np.zeros_like(logits)


def of_joiner(backend, dtype, logits, targets, logit_lengths, target_lengths, blank, topology, upstream, **options):
    """Losses and gradient of fused_transducer, with logits as weights; a symbol at -inf has such a bias."""
    from fused_helpers import transducer_loss  # which keeps what is compiled

    given = {"delay_penalty": options.pop("penalty", 0.0), "backend": backend, "blank": blank, "activation": "relu"}
    given.update(options, topology="regular" if topology == "delay-penalty" else topology)
    given.update(reduction="sum", negligible=0.0)
    losses, gradient = np.zeros(len(logits)), np.zeros_like(logits)
    for n, (T, U) in enumerate(zip(logit_lengths, target_lengths)):
        cells = torch.from_numpy(logits[n, :T, : U + 1]).to(dtype).flatten(0, 1)
        impossible = cells.isinf().all(0)
        weight = cells.masked_fill(impossible, 0).t().contiguous().requires_grad_()
        bias = torch.zeros(len(weight), dtype=dtype).masked_fill_(impossible, -torch.inf)
        encoder_out = torch.eye(T, dtype=dtype).repeat_interleave(U + 1, 1).unsqueeze(0)
        decoder_out = torch.eye(U + 1, dtype=dtype).repeat(1, T).unsqueeze(0) - 1
        integers = [torch.as_tensor([x]) for x in (targets[n, :U], T, U)]
        loss = transducer_loss(encoder_out, decoder_out, weight, bias, *integers, **given)
        (loss * upstream[n]).backward()
        losses[n] = loss.item()
        gradient[n, :T, : U + 1] = weight.grad.t().unflatten(0, (T, U + 1))
    return losses.astype(str(dtype)[6:]), gradient


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_loss_is_right(backend, dtype):
    native = pytest.importorskip("fused_transducer.native")
    if backend == "native" and native.unavailable(torch.device("cpu"), dtype):
        pytest.skip(native.unavailable(torch.device("cpu"), dtype))
    assert check.check(partial(of_joiner, backend, dtype)) == []


def test_every_topology_has_its_cases_and_the_folder_is_small():
    names = {case["topology"] for case in check.cases()}
    assert names == {"regular", *LATTICES} and sum(file.stat().st_size for file in FOLDER.iterdir()) < 2e6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_is_right(dtype):
    assert check.check(partial(answer, topologies.transducer_loss, dtype)) == []


#: Faults that need a large factor of the loss, or more utterances than a vector has.
BEYOND = (ClampsTheLastGradient, OfFive)


@pytest.mark.parametrize(
    "kernel", [Broken, *(kernel for kernel in SMALL if kernel not in BEYOND)], ids=lambda kernel: kernel.__name__
)
def test_a_broken_kernel_fails_a_vector(kernel):
    assert bool(check.check(partial(answer, kernel(), torch.float64), "regular")) == (kernel is not Broken)


def test_they_are_made_anew_bit_for_bit(tmp_path):
    make.main(tmp_path)
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

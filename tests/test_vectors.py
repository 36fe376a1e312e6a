"""The vectors that others run: ours are right, kernels with a fault are not, and they are made anew bit for bit."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import ROOT
from test_broken_losses import SMALL, Broken

from common.core.implementations import LATTICES
from common.losses import vectorised
from common.losses.topologies import TOPOLOGIES

FOLDER = ROOT / "vectors"


def module(name):
    """A script of the folder."""
    spec = importlib.util.spec_from_file_location(f"vectors_{name}", FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


check = module("check")


def answer(kernel, dtype, logits, targets, logit_lengths, target_lengths, blank, topology, upstream, **options):
    """Losses and gradient of a loss in torch."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    lattice = replace(TOPOLOGIES[topology], **values)
    leaf = torch.from_numpy(logits).to(dtype).requires_grad_()
    given = [torch.from_numpy(array) for array in (targets, logit_lengths, target_lengths)]
    losses = kernel(leaf, *given, blank=blank, reduction="none", topology=lattice)
    finite = losses.isfinite()
    (losses * torch.from_numpy(upstream).to(dtype))[finite].sum().backward()
    if leaf.dtype == torch.float64:
        logits[...] = leaf.detach().numpy()
    return losses.detach().numpy(), leaf.grad.numpy() if leaf.grad is not None else np.zeros_like(logits)


def test_every_topology_has_its_cases_and_the_folder_is_small():
    names = {case["topology"] for case in check.cases()}
    assert names == {"regular", *LATTICES} and sum(file.stat().st_size for file in FOLDER.iterdir()) < 2e6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_is_right(dtype):
    wrong = check.check(lambda *given, **named: answer(vectorised.transducer_loss, dtype, *given, **named))
    assert wrong == []


@pytest.mark.parametrize("kernel", [Broken, *SMALL], ids=lambda kernel: kernel.__name__)
def test_a_broken_kernel_fails_a_vector(kernel):
    broken = kernel()
    wrong = check.check(lambda *given, **named: answer(broken, torch.float64, *given, **named), "regular")
    assert bool(wrong) == (kernel is not Broken)


def test_they_are_made_anew_bit_for_bit(tmp_path):
    module("make").main(tmp_path)
    for name in ("values.npy", "index.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_checker_runs_alone(tmp_path):
    for name in ("check.py", "index.json", "values.npy"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "mine.py").write_text("def loss(logits, *given, **named):\n    return logits.sum((1, 2, 3)), logits\n")
    line = [sys.executable, "check.py", "mine:loss", "tdt"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "tdt durations without 0: loss" in done.stderr

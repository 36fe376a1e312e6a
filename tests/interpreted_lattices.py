"""Run by test_fused_triton_lattices.py with TRITON_INTERPRET=1: the Triton kernels of each lattice on the CPU.  Prints
one line of JSON for each case: its name, the errors of loss and gradients, and what else it is asked for.

Arguments: the lattices to run, all without any; --few: of each the first cases alone, smaller.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import numpy
import torch
from fused_helpers import NAMES, computed, error, errors, interpret_faster, lattice_problem, right
from sanitize import LATTICES

from fused_transducer import align

warnings.simplefilter("ignore")  # numpy's, of -inf minus -inf where Triton chooses another value
numpy.seterr(all="ignore")
interpret_faster()

ROOMY = [(5, 2), (4, 1), (3, 0)]  # every lattice has a path for each
RAGGED = [(5, 2), (3, 4), (1, 2), (4, 0)]  # T < U, T = 1 and U = 0 among them
DURATIONS = {"tdt": [[1, 2, 4], [0, 3], [2, 2]], "multi-blank": [[30_000], [3, 3]]}
#: Those where a target may be the blank, and those that have label smoothing.
WITH_BLANKS = ("tdt", "multi-blank", "hat", "star")
SMOOTHED = ("modified", "modified-last-blank", "constrained", "star")


def report(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


def on(topology: str, lengths=None, **options):
    options = {"dtype": torch.float32, "scale": 0.5, "backend": "triton", **options}
    return lattice_problem(topology, lengths or ROOMY, **options)


def of_backends(case):
    """Return the errors of loss and gradients between the Triton kernels and the C++ code."""
    (losses, made), (expected_losses, expected) = computed(case), computed(case, backend="native")
    return {"loss": error(losses, expected_losses), **{name: error(made[name], expected[name]) for name in NAMES}}


def with_a_path(case):
    """Return the errors where the oracle's loss is finite; inf if other utterances cost anything but inf.  The padding
    of the kernels' inputs is NaN."""
    expected, of_finite = right(case)
    case.spoil_padding()
    losses, gradients = computed(case)
    finite = expected.isfinite()
    made = {"loss": error(losses[finite], expected[finite])} if torch.equal(losses.isinf(), ~finite) else {"loss": 1e30}
    rest = {"others": gradients["encoder_out"][~finite].abs().sum().item()}
    return {**made, **{name: error(gradients[name], of_finite[name]) for name in NAMES}, **rest}


few = "--few" in sys.argv
if few:
    ROOMY, RAGGED = [(4, 2), (3, 1)], [(4, 2), (2, 3), (1, 1), (2, 0)]
for topology in [name for name in sys.argv[1:] if name != "--few"] or LATTICES:
    fewer = {"durations": [0, 2, 3]} if few and topology == "tdt" else {}
    report(f"{topology}: no path", errors=with_a_path(on(topology, RAGGED, **fewer)))

    case, made = on(topology, **fewer), {}
    for backend in ("triton", "native"):
        leaves = case.leaves()
        losses, dropped, posteriors = case.loss(
            leaves, backend=backend, negligible=0.3, return_dropped=True, return_posteriors=True
        )
        (losses * torch.tensor([1.0, -2.0, 0.0])[: len(losses)]).sum().backward()
        made[backend] = [dropped, posteriors, *(leaf.grad for leaf in leaves)]
    names = ("dropped", "posteriors", *NAMES)
    of_each = dict(zip(names, map(error, made["triton"], made["native"])))
    report(f"{topology}: what is dropped", errors=of_each, share=made["triton"][0].max().item())

    if few:
        continue

    many = {"V": 259, "H": 37, "blank": 130, "tile_cells": 9, "fastemit_lambda": 0.3, "delay_penalty": 0.1}
    case = on(topology, activation="gelu", dropout=0.3, dropout_seed=5, **many)
    if topology in WITH_BLANKS:
        case.targets[0, 1] = 130
    report(f"{topology}: every option", errors=of_backends(case))
    report(f"{topology}: FastEmit", errors=errors(on(topology, fastemit_lambda=0.3, delay_penalty=0.1, blank=10)))
    report(f"{topology}: bfloat16", errors=errors(on(topology, dtype=torch.bfloat16)))
    for durations in DURATIONS.get(topology, ()):
        case = on(topology, [(6, 2), (2, 1), (4, 0)], durations=durations)
        report(f"{topology}: durations {durations}", errors=with_a_path(case))
    if topology in SMOOTHED:
        report(f"{topology}: label smoothing", errors=of_backends(on(topology, label_smoothing=0.1)))

    case = on(topology)
    case.tensors[0][1, 2, 0] = float("nan")
    losses, gradients = computed(case)
    has_nan = [bool(gradients["encoder_out"][n].isnan().any()) for n in range(3)]
    report(f"{topology}: a NaN", errors={}, losses=losses.isnan().tolist(), gradients=has_nan)

    case, options = on(topology), {"topology": topology, **LATTICES[topology]}
    given = (*case.tensors, case.targets, case.T_lengths, case.U_lengths)
    paths, expected_paths = (align(*given, backend=name, **options) for name in ("triton", "native"))
    report(f"{topology}: best paths", errors=dict(zip(("frames", "scores"), map(error, paths, expected_paths))))

    case = on(topology, [(24, 8)], H=24, seed=1)
    case.tensors[3][10] += 150
    case.targets[case.targets == 10] = 1
    expected = right(case)
    report(f"{topology}: thousands of nats", errors=errors(case, expected), loss=expected[0].item())

    case = on(topology, [(3, 0), (2, 0)], V=2, blank=1)
    case.tensors[2:] = [tensor[1:] for tensor in case.tensors[2:]]
    case.options["blank"] = 0
    report(f"{topology}: one symbol", errors=errors(case))

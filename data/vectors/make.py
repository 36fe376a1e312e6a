#!/usr/bin/env python3
"""Make the vectors anew: inputs, losses and gradients in float64, by the oracle that judges every
implementation.

Writes values.npy, one flat array of float64, and index.json, which says what is where.  The inputs
are exact fractions; losses and gradients are rounded to 12 digits, so that every machine makes the
same bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rnnt_bench.losses import oracle  # noqa: E402
from rnnt_bench.losses.topologies import TOPOLOGIES  # noqa: E402

VERSION = 1
V = 6
#: Parameters of each topology, which the index has as options.
OPTIONS: dict[str, dict[str, Any]] = {
    "tdt": {"durations": [0, 1, 2, 3, 4], "sigma": 0.05},
    "multi-blank": {"durations": [2, 4], "sigma": 0.05},
    "delay-penalty": {"penalty": 0.1},
    "windowed": {"window": 3},
}
Shapes = Sequence[tuple[int, int]]
#: name -> (T, U) of the utterances and what differs from the usual case.  Larger batches come
#: before smaller ones, and two have the same shape, for losses that keep something between calls.
CASES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "long": ([(24, 10)], {}),
    "ragged": ([(9, 4), (6, 3), (8, 1)], {}),
    "the same shape again": ([(9, 4), (6, 3), (8, 1)], {}),
    "16 frames": ([(16, 3), (12, 5)], {}),
    "16 positions": ([(16, 15)], {}),
    "one frame": ([(1, 0)], {}),
    "one frame in a batch": ([(5, 2), (1, 0)], {}),
    "no targets": ([(6, 0), (4, 0)], {}),
    "as many targets as frames": ([(4, 4)], {}),
    "more targets than frames": ([(3, 5)], {}),
    "padding": ([(6, 3), (4, 2)], {"slack": (2, 1)}),
    "blank in the middle": ([(7, 3), (5, 2)], {"blank": 2}),
    "blank is the last symbol": ([(7, 3), (5, 2)], {"blank": V - 1}),
    "repeated labels": ([(7, 4)], {"label": 3}),
    "logits of +-80": ([(7, 3), (5, 2)], {"scale": 80.0}),
    "logits of +-10000": ([(7, 3), (5, 2)], {"scale": 1e4}),
    "a large loss": ([(20, 8)], {"scale": 900.0}),
    "a symbol at -infinity": ([(6, 3)], {"minus_inf": 4, "label": 3}),
    "a target that no path reaches": ([(6, 3)], {"minus_inf": 3, "label": 3}),
    "upstream gradients": ([(7, 3), (5, 2), (6, 1)], {"upstream": [2.0, -0.5, 0.0]}),
}
#: Further ones of topologies with durations, by what they change.
OF_DURATIONS: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "durations without 0": ([(9, 4), (6, 3)], {"durations": [1, 2, 3, 4]}),
    "durations with gaps": ([(8, 4), (6, 3)], {"durations": [0, 2, 4]}),
    "one duration": ([(7, 3), (5, 2)], {"durations": [1]}),
    "fewer frames than the duration": ([(3, 1)], {"durations": [4]}),
    "no sigma": ([(7, 3), (5, 2)], {"sigma": 0.0}),
}


#: Of expected errors, whose rows are hypotheses: utterance_of and errors have a number for each.
OF_HYPOTHESES: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "two utterances": (
        [(7, 3), (5, 2), (7, 2), (5, 3), (7, 0)],
        {"utterance_of": [0, 1, 0, 1, 0], "errors": [1, 2, 0, 3, 4]},
    ),
    "one hypothesis": ([(6, 3)], {"utterance_of": [0], "errors": [2]}),
    "as many errors each": ([(6, 3), (6, 2)], {"utterance_of": [0, 0], "errors": [2, 2]}),
    "a hypothesis that no path reaches": (
        [(6, 3), (6, 2), (6, 4)],
        {"utterance_of": [0, 0, 0], "errors": [0, 1, 3], "minus_inf": 5},
    ),
    "upstream gradients": (
        [(4, 2), (6, 1), (4, 1), (6, 2)],
        {"utterance_of": [0, 1, 0, 1], "errors": [1, 0, 0, 5], "upstream": [2.0, -0.5]},
    ),
}


class Writer:
    """Collects arrays into one, and describes where each is."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def add(self, array: np.ndarray) -> dict[str, Any]:
        """Return the offset and shape of an array."""
        where = {"offset": self.size, "shape": list(array.shape)}
        self.parts.append(array.astype(np.float64).ravel())
        self.size += array.size
        return where


def fractions(count: int, stream: int) -> np.ndarray:
    """Return `count` exact fractions in [-1, 1), other ones for each stream."""
    k = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream * 1_000_003)
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):  # wraps, as hashes do
        k = (k ^ (k >> np.uint64(29))) * np.uint64(factor)
    return (k >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0


def rounded(array: torch.Tensor) -> np.ndarray:
    """Return numbers with 12 digits."""
    return np.array([float(f"{number:.12g}") for number in array.flatten().tolist()]).reshape(
        array.shape
    )


def expected_errors(
    losses: torch.Tensor, utterance_of: list[int], errors: list[int]
) -> torch.Tensor:
    """Return the expected errors (utterances,) of each list of hypotheses, less the mean of its
    errors."""
    of_utterances = []
    for n in range(max(utterance_of) + 1):
        rows = [
            m for m, utterance in enumerate(utterance_of) if utterance == n and losses[m].isfinite()
        ]
        mean = np.mean([errors[m] for m, utterance in enumerate(utterance_of) if utterance == n])
        apart = torch.tensor([errors[m] - mean for m in rows], dtype=torch.float64)
        of_utterances.append(((-losses[rows]).softmax(0) * apart).sum())
    return torch.stack(of_utterances)


def made(
    writer: Writer,
    topology: str,
    name: str,
    shapes: Shapes,
    stream: int,
    blank: int = 0,
    scale: float = 3.0,
    slack: tuple[int, int] = (0, 0),
    label: int | None = None,
    minus_inf: int | None = None,
    upstream: list[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the entry of the index of one case, whose arrays go to `writer`."""
    options = {**OPTIONS.get(topology, {}), **options}
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    lattice = (
        TOPOLOGIES["regular"] if topology == "mwer" else replace(TOPOLOGIES[topology], **values)
    )
    N, T, U = (
        len(shapes),
        max(T for T, _ in shapes) + slack[0],
        max(U for _, U in shapes) + slack[1],
    )
    size = (N, T, U + 1, V + lattice.extra)
    logits = torch.from_numpy(scale * fractions(int(np.prod(size)), stream).reshape(size))
    if minus_inf is not None:
        logits[..., minus_inf] = -float("inf")
    symbols = [symbol for symbol in range(V) if symbol != blank]
    targets = torch.tensor(
        [[symbols[(n + 2 * u + u * u) % (V - 1)] for u in range(U)] for n in range(N)]
    ).view(N, U)
    if label is not None:
        targets.fill_(label)
    leaf = logits.clone().requires_grad_()
    losses = oracle.losses(leaf, targets, shapes, blank, lattice)
    losses = expected_errors(losses, **options) if topology == "mwer" else losses
    factors = torch.tensor(upstream or [1.0] * len(losses), dtype=torch.float64)
    finite = losses.isfinite()
    gradient = torch.zeros_like(logits)
    if finite.any():  # an infinite loss has no gradient
        (gradient,) = torch.autograd.grad((losses * factors)[finite].sum(), leaf)
    return {
        "topology": topology,
        "name": name,
        "blank": blank,
        "options": options,
        "targets": targets.tolist(),
        "logit_lengths": [T for T, _ in shapes],
        "target_lengths": [U for _, U in shapes],
        "upstream": writer.add(factors.numpy()),
        "logits": writer.add(logits.numpy()),
        "losses": writer.add(rounded(losses.detach())),
        "gradient": writer.add(rounded(gradient)),
    }


def main(folder: Path) -> None:
    """Write values.npy and index.json into `folder`."""
    writer, entries = Writer(), []
    for number, topology in enumerate([*TOPOLOGIES, "mwer"]):
        cases = (
            OF_HYPOTHESES
            if topology == "mwer"
            else {**CASES, **(OF_DURATIONS if topology == "tdt" else {})}
        )
        for stream, (name, (shapes, changes)) in enumerate(cases.items()):
            entries.append(made(writer, topology, name, shapes, 100 * number + stream, **changes))
    np.save(folder / "values.npy", np.concatenate(writer.parts), allow_pickle=False)
    index = {"version": VERSION, "symbols": V, "cases": entries}
    (folder / "index.json").write_text(
        json.dumps(index, separators=(",", ":")) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HERE, help="Default: beside this file"
    )
    main(parser.parse_args().folder)

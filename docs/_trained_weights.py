#!/usr/bin/env python3
"""Make common/losses/weights: what --logits early, middle and trained draw their inputs from.

    .venv/main/bin/python docs/_trained_weights.py

It trains the model of examples/train.py as icefall does, with 100 syllables.  The loss is fast_rnnt-pruned, so that
there are projections of the simple loss too.  It packs what the joiner sees after 20 steps, after a third of all steps
and at the end, in float16.  This takes a few minutes on two quiet cores and needs espeak-ng.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402
from rnnt_bench.core import flag_types  # noqa: E402
from rnnt_bench.core.arguments import Parser  # noqa: E402
from rnnt_bench.core.errors import (  # noqa: E402
    EXIT_OK,
    NotRunnable,
    UserError,
    guarded,  # noqa: E402
)
from rnnt_bench.core.settings import STAGES  # noqa: E402
from rnnt_bench.losses.inputs import FOLDER as WEIGHTS  # noqa: E402
from rnnt_bench.setup import extensions  # noqa: E402

#: Frames of held-out utterances that are kept: all three files are to have at most 3 MB.
FRAMES = 2400


def trained(folder: Path, flags: list[str]) -> None:
    """Train, and save the model at three stages into `folder`.  Raises UserError if that fails."""
    command = [sys.executable, train.__file__, "--loss", "fast_rnnt-pruned", "--save", folder, *flags]
    try:  # torch is imported above: fast_rnnt needs its libraries
        fast_rnnt = Path(str(extensions.load("fast_rnnt", "cpu").__file__)).parents[1]
    except NotRunnable as error:
        raise UserError(str(error)) from error
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{fast_rnnt}"}
    if subprocess.run(list(map(str, command)), env=variables, stdout=sys.stderr).returncode:
        raise UserError("examples/train.py failed; its error is above")


def packed(paths: list[Path]) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each stage; `paths` are of the saved models, the last one trained, which says the frames.

    encoder_out (F, H) of utterances one after another, T_lengths and U_lengths (K,) of these, targets (S,), frames (S,)
    at which the trained model emits each; decoder (V, H) after each symbol; weight and bias of output, am and lm; step
    and nats a symbol on these utterances.
    """
    saved = [torch.load(path, weights_only=True) for path in paths]
    pairs: list[Any] = []
    for pair in saved[-1]["held_out"]:
        if sum(len(features) for features, _ in [*pairs, pair]) <= FRAMES:
            pairs.append(pair)
    frames = emitted(model_of(saved[-1]), pairs)
    return [{**stage(model_of(each), pairs), **frames, "step": np.int32(path.stem)} for each, path in zip(saved, paths)]


def model_of(saved: dict[str, Any]) -> train.Model:
    """Return the model whose state was saved."""
    model = train.Model(len(saved["model"]["decoder.weight"]))
    model.load_state_dict(saved["model"])
    return model.eval().requires_grad_(False)


def emitted(model: train.Model, pairs: list[Any]) -> dict[str, np.ndarray]:
    """Return the frame at which each symbol is emitted on the best path, counted from the first utterance."""
    encoder_out, T, targets, U = model.encode(pairs)
    decoder_out = model.decoder(torch.nn.functional.pad(targets, (1, 0)))
    frames, _ = model.joiner.align(encoder_out, decoder_out, targets, T, U)
    begins = T.cumsum(0) - T
    return {"frames": np.concatenate([(frames[n, : U[n]] + begins[n]).numpy() for n in range(len(pairs))]).astype("i4")}


def stage(model: train.Model, pairs: list[Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a stage but frames and step."""
    encoder_out, T, targets, U = model.encode(pairs)
    layers = {"output": model.joiner.output_linear, "am": model.am, "lm": model.lm}
    real = {
        "encoder_out": torch.cat([encoder_out[n, :length] for n, length in enumerate(T)]),
        "decoder": model.decoder.weight,
        **{f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()},
    }
    whole = {"T_lengths": T, "U_lengths": U, "targets": torch.cat([symbols for _, symbols in pairs])}
    return {
        **{name: tensor.numpy().astype(np.float16) for name, tensor in real.items()},
        **{name: tensor.numpy().astype(np.int32) for name, tensor in whole.items()},
        "nats": np.float64(model.loss(pairs, "fused")),
    }


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.saved or Path(scratch)
        if not arguments.saved:
            trained(folder, ["--vocab", "101", "--utterances", "1600", "--steps", "1600", *arguments.flags])
        paths = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
        if len(paths) != len(STAGES):
            raise UserError(f"{folder}: has {len(paths)} saved models and not {len(STAGES)}")
        arguments.output.mkdir(parents=True, exist_ok=True)
        for name, arrays in zip(STAGES, packed(paths)):
            path = arguments.output / f"{name}.npz"
            np.savez_compressed(path, **arrays)
            size, nats = path.stat().st_size / 1e6, arrays["nats"]
            print(f"{path.name}: step {arrays['step']}, {nats:.3g} nats a symbol, {size:.2f} MB")
    return EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    add = result.add_argument
    add(
        "--saved",
        type=flag_types.path,
        metavar="DIR",
        help="Take what examples/train.py saved here, in place of training.",
    )
    add("--output", type=flag_types.path, default=WEIGHTS, metavar="DIR", help="Folder. Default: common/losses/weights")
    add("flags", nargs="*", help="Further flags of examples/train.py, after --.")
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("trained_weights.py", lambda: main(given)))

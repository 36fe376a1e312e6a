"""Write a shape file: (T, U) of every utterance of a corpus, from which the benchmarks draw their
batches.

T is the number of encoder frames after subsampling, U the number of BPE tokens of the text.  They
come from a lhotse manifest, without computing features, or are drawn from the published figures of
train-clean-100.  lhotse makes manifests of corpora (`lhotse prepare librispeech`) and of Kaldi
folders (`lhotse kaldi import`).  A JSON file beside the shape file has the source, hashes, counts
and versions; the same input gives the same files.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path

from rnnt_bench.core.arguments import Parser, refuse
from rnnt_bench.core.called import command, or_set_up
from rnnt_bench.core.errors import EXIT_OK, UserError, say
from rnnt_bench.core.flag_types import Whole, path, positive, seed

EXAMPLES = f"""examples:
  {command("shapes")} --manifest cuts.jsonl.gz --bpe-model bpe.model --output mine.pt
  {command("shapes")} --manifest librispeech_supervisions_train-clean-100.jsonl.gz --bpe-vocab-size 500 \\
      --speed-perturbation 0.9 1.0 1.1 --output mine.pt
  {command("run")} --shape-file mine.pt"""
#: The value of --features without FILE.
WRITE = Path()
#: Flags that only apply with --manifest.
MANIFEST_ONLY = (
    "recordings",
    "bpe_model",
    "bpe_vocab_size",
    "bpe_model_type",
    "subsampling_factor",
    "speed_perturbation",
    "perturb_again",
    "frame_shift",
    "keep_empty",
    "limit",
    "min_duration",
    "max_duration",
)


def parser() -> Parser:
    """Return the parser of the flags of `shapes`."""
    top = Parser(description=__doc__, epilog=EXAMPLES)
    source = (
        top.add_argument_group("source (exactly one)")
        .add_mutually_exclusive_group(required=True)
        .add_argument
    )
    source(
        "--manifest",
        type=path,
        metavar="FILE",
        help="Manifest of lhotse: cuts or supervisions, .json or .jsonl, .gz or not.",
    )
    source(
        "--from-figures",
        action="store_true",
        help="Draw from the published figures of train-clean-100.",
    )

    of_source = top.add_argument_group("about the source").add_argument
    of_source(
        "--recordings",
        type=path,
        metavar="FILE",
        help="Manifest of the recordings of supervisions. Default: the one beside them with recordings in its name",
    )
    of_source(
        "--features",
        type=path,
        nargs="?",
        const=WRITE,
        metavar="FILE",
        help="Manifest of the features of supervisions, for their frames. Without FILE: also write (feature frames, "
        "U) beside the output as NAME.features.pt, for the profile of a model.",
    )
    of_source(
        "--seed",
        type=seed,
        help="Seed of --from-figures. Default: that of the suite's shape_info.pt",
    )

    tokens = top.add_argument_group("tokens (a model, or the size of one to train)").add_argument
    tokens(
        "--bpe-model",
        type=path,
        metavar="FILE",
        help="SentencePiece model, such as icefall's lang_bpe_500/bpe.model.",
    )
    tokens(
        "--bpe-vocab-size",
        type=Whole(1),
        metavar="V",
        help="Train a model of V tokens and write it beside the output.",
    )
    tokens(
        "--bpe-model-type",
        choices=("bpe", "unigram"),
        default="bpe",
        help="Type of model to train; icefall trains unigram. Default: bpe",
    )

    frames = top.add_argument_group("frames").add_argument
    frames(
        "--subsampling-factor",
        type=int,
        choices=(1, 2, 4, 6, 8),
        default=4,
        help="Subsampling factor of the encoder. Default: 4",
    )
    frames(
        "--speed-perturbation",
        type=positive,
        nargs="+",
        metavar="X",
        default=[1.0],
        help="Speeds; every utterance is counted once at each. icefall trains on 0.9 1.0 1.1; its training cuts have "
        "all three already, so leave this out for them. At other speeds than 1.0 frames follow from the duration even "
        "where there are features, as in lhotse. Default: 1.0",
    )
    frames(
        "--perturb-again",
        action="store_true",
        help="Also perturb cuts and supervisions that are perturbed already, as icefall's training cuts are "
        "(..._sp0.9).",
    )
    frames(
        "--frame-shift",
        type=positive,
        metavar="S",
        default=0.01,
        help="Frame shift in seconds, where there are no features. Default: 0.01",
    )

    out = top.add_argument_group("output").add_argument
    out("--keep-empty", action="store_true", help="Keep utterances without text, with U = 0.")
    out(
        "--min-duration",
        type=positive,
        metavar="S",
        help="Leave out shorter utterances, after perturbation (icefall: 1).",
    )
    out(
        "--max-duration",
        type=positive,
        metavar="S",
        help="Leave out longer utterances, after perturbation (icefall: 20).",
    )
    out(
        "--limit", type=Whole(1), metavar="N", help="Read only the first N utterances. Default: all"
    )
    out(
        "--output",
        type=path,
        metavar="FILE",
        default=Path("shape_info.pt"),
        help="File to write. Default: shape_info.pt",
    )
    return top


def main(options: Namespace) -> int:
    """Write the shape file, print what was written, and return the exit code."""
    try:
        return generate(options)
    except KeyboardInterrupt:
        say("no shape file was written")
        raise


def generate(flags: Namespace) -> int:
    """Write the shape file that the flags describe; return the exit code.  Where a package is
    missing, start again in the main environment, or raise UserError."""
    check(flags)
    packages = ["torch", "numpy"]
    if not flags.from_figures:
        packages += ["lhotse", "sentencepiece"]
    try:
        for package in packages:
            importlib.import_module(package)
    except ImportError as error:
        from rnnt_bench.setup import interpreters

        interpreters.continue_in("main")
        advice = or_set_up(f"pip install {' '.join(packages)}")
        raise UserError(f"{sys.executable} lacks a package ({error}): {advice}") from error
    from rnnt_bench.data import generation

    for line in generation.generate(flags):
        print(line)
    return EXIT_OK


def check(flags: Namespace) -> None:
    """Raise UserError for flags that do not go together.  Set `write_features` for --features
    without FILE, and `features` to None then."""
    flags.write_features = flags.features is WRITE
    if flags.write_features:
        flags.features = None
    if flags.from_figures:
        refuse(
            parser(), flags, MANIFEST_ONLY, "does not go with --from-figures; leave one of them out"
        )
    else:
        refuse(parser(), flags, ["seed"], "does not go with --manifest; leave one of them out")
    if flags.manifest and (flags.bpe_model is None) == (flags.bpe_vocab_size is None):
        raise UserError(
            "give either --bpe-model FILE or --bpe-vocab-size V (500 in icefall), to count tokens with"
        )
    if flags.bpe_model_type != "bpe" and flags.bpe_model:
        raise UserError("--bpe-model-type is for --bpe-vocab-size; leave it out with --bpe-model")
    if flags.min_duration and flags.max_duration and flags.min_duration > flags.max_duration:
        raise UserError(
            f"--min-duration {flags.min_duration}: is above --max-duration; no utterance is between"
        )

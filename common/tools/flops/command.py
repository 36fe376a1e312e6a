"""The command `flops`: from flags to a count and its table.

The model is counted in a process of its own, since this one has no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rnnt_bench.cli.parser import add_setting
from rnnt_bench.core import errors, flag_types, settings
from rnnt_bench.core.arguments import Parser, refuse
from rnnt_bench.jobs import job, session
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import commands, kept
from rnnt_bench.tools.flops import show

DESCRIPTION = """Count the FLOPs and MACs of a model, forward and backward, by module, class of module or operator.

One multiply-accumulate is one MAC and two FLOPs.  Every operator of torch is seen, however it is called; one without a
rule is named."""
EXAMPLES = """examples:
  rnnt-bench flops torchaudio.models:wav2vec2_base --input-shape 1x16000
  rnnt-bench flops torchaudio.models:Conformer --arg input_dim=80 --arg num_heads=8 --arg ffn_dim=2048 \\
      --arg num_layers=12 --arg depthwise_conv_kernel_size=31 --input-shape 2x1000x80 2:int64=1000 --backward
  rnnt-bench flops encoder.py:Encoder --args encoder.yaml --input-shape 1x80x1000 --by operator --format csv
  rnnt-bench flops torchaudio.models:hubert_base --audio LibriSpeech/test-clean --device meta
  rnnt-bench flops s3prl:hubert --pseudo-input 160000
  rnnt-bench flops hf:facebook/hubert-base-ls960 --pseudo-input

Exit code: 0; 2 for bad usage, a model that cannot be made or does not take its input, or with --strict an operator
without a rule."""
#: Samples of --pseudo-input without a number: ten seconds; with --preset quick a second.
PSEUDO_SAMPLES, QUICK_SAMPLES = 160000, 16000
#: Flags that say how a count is carried out or shown, not what is counted.
PRESENTATION = (
    "by",
    "depth",
    "details",
    "format",
    "log_dir",
    "preset",
    "quiet",
    "resume",
    "strict",
    "timeout",
)
#: Default of --depth for a table, and more names than the path of a module has.
DEPTH, ALL = 2, 10**6


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    result.add_argument(
        "model",
        metavar="MODEL",
        help="Model: package.module:name or file.py:name (a class, a function that makes a model, or a model), "
        "s3prl:upstream or hf:name (with weights that are here already).",
    )
    whole = flag_types.Whole(1)
    add = result.add_argument_group("the model").add_argument
    add(
        "--args",
        type=flag_types.path,
        metavar="FILE",
        help="YAML or JSON file of the constructor's arguments.",
    )
    add(
        "--arg",
        action="append",
        default=[],
        type=flag_types.key_value("KEY=VALUE", empty=True),
        metavar="KEY=VALUE",
        help="An argument of the constructor, in place of that of --args. Repeatable.",
    )
    add("--method", default="forward", metavar="NAME", help="Method to call. Default: forward")
    add(
        "--device",
        help="Device: cpu, cuda, cuda:N, or meta, which takes no memory and no time. Default: cpu",
    )
    add(
        "--train", action="store_true", help="Put the model into training mode. Default: evaluation"
    )
    add(
        "--backward",
        action="store_true",
        help="Also count the backward, from ones for every output.",
    )
    group = result.add_argument_group("its input")
    group.add_argument(
        "--input-shape",
        nargs="+",
        default=[],
        metavar="SHAPE",
        help="Shapes of the input tensors: 1x80x1000, 2x50:int64 (ones), 2:int64=1000 (filled), name@1x80 (a keyword). "
        "With --audio, S stands for the number of samples and F for that of frames. Default: 1xS with --audio",
    )
    group.add_argument(
        "--audio",
        type=flag_types.path,
        metavar="DIR",
        help="Count one run for each file below DIR, by its length alone, in four buckets; or for each number of "
        "samples in a text file.",
    )
    group.add_argument(
        "--pseudo-input",
        nargs="?",
        type=whole,
        const=PSEUDO_SAMPLES,
        metavar="SAMPLES",
        help="Take an utterance of random numbers as input, of so many samples. Without a number: 160000.",
    )
    add_setting(group, "batch_size", "Utterances of --pseudo-input. Default: 1", default=1)
    group.add_argument(
        "--sample-rate", type=whole, default=16000, metavar="HZ", help="Sample rate. Default: 16000"
    )
    group.add_argument(
        "--hop", type=whole, default=160, metavar="N", help="Samples of a frame. Default: 160"
    )
    add = result.add_argument_group("the count").add_argument
    add("--by", choices=show.BREAKDOWNS, default="module", help="Unit of a row. Default: module")
    add(
        "--depth",
        type=lambda text: ALL if text == "all" else flag_types.Whole(0)(text),
        metavar="N",
        help="Show modules down to N names below the model, or all. Default: 2; all with --format csv and json",
    )
    add("--strict", action="store_true", help="End with an error if an operator has no rule.")
    add(
        "--register",
        type=flag_types.path,
        metavar="FILE",
        help="File that calls rnnt_bench.flop_rules.register.",
    )
    quick = f"--device meta, and --pseudo-input {QUICK_SAMPLES} where no input is given"
    commands.add_flags(
        result.add_argument_group("the run"), folder="flops-<model>", quick=quick, timeout=None
    )
    return result


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Count the operations of a model; return the exit code.  Raises UserError."""
    quick: dict[str, Any] = {"device": "meta"}
    if not (arguments.input_shape or arguments.audio or arguments.pseudo_input):
        if not arguments.preset:
            raise errors.UserError("give --input-shape, --audio or --pseudo-input")
        quick["pseudo_input"] = QUICK_SAMPLES
    # `others` holds without --preset quick: meta tensors have no values, which some models need.
    commands.set_quick(arguments, quick, others={"device": "cpu"})
    if arguments.audio and arguments.pseudo_input:
        raise errors.UserError("give --audio or --pseudo-input, not both")
    if not arguments.pseudo_input:
        reason = "is of --pseudo-input; give that, or the size in --input-shape"
        refuse(parser(), arguments, ("batch_size",), reason)
    is_table = arguments.format not in ("csv", "json")
    if arguments.depth is None and is_table:
        arguments.depth = DEPTH
    flags = {
        flag: str(value) if isinstance(value, Path) else value
        for flag, value in vars(arguments).items()
    }
    config = show.Config(
        flags={flag: value for flag, value in flags.items() if flag not in PRESENTATION},
        by=arguments.by,
        depth=arguments.depth,
        sample_rate=arguments.sample_rate,
    )
    request = {"flags": flags, "current": str(Path.cwd())}
    task = job.Task(show.JOB, "flops", request, python=interpreters.with_torch())

    def answer(run: kept.Kept) -> kept.Answer:
        """Return the answer; print what is not counted where the format has no room for it."""
        result = show.answer(run)
        if not is_table:
            for line in result.lines:
                print(f"warning: {line}", file=sys.stderr)
        return result

    name = commands.run_name(arguments.model)
    resolved = settings.resolve({}, device="cpu")
    return commands.measured(
        show.TOOL, name, config, [task], resolved, arguments, answer, executor, timed=False
    )

"""The command count_flops.py: from flags to a count and its table.

A model is counted in a process of its own; torch is imported here for --rules alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from common.cli import flags
from common.cli.parser import Parser
from common.core import flag_types, settings
from common.core.errors import EXIT_OK, UserError
from common.core.text import plain
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.spec import Task
from common.records import documents
from common.records.schema import Record, as_written
from common.setup import interpreters
from common.tools import commands as model_run
from common.tools.flops import records
from common.tools.flops import rows as flops
from common.tools.flops import section as report
from common.tools.flops import table as tables
from common.tools.flops.documents import CountedDocument

DESCRIPTION = """Count the FLOPs and MACs of a model, forward and backward, by module, class of module or operator.

One multiply-accumulate is one MAC and two FLOPs; --rules prints every rule.  Every operator of torch is seen,
however it is called; one without a rule is named."""
EXAMPLES = """examples:
  count_flops.py torchaudio.models:wav2vec2_base --input-shape 1x16000
  count_flops.py torchaudio.models:Conformer --arg input_dim=80 --arg num_heads=8 --arg ffn_dim=2048 \\
      --arg num_layers=12 --arg depthwise_conv_kernel_size=31 --input-shape 2x1000x80 2:int64=1000 --backward
  count_flops.py encoder.py:Encoder --args encoder.yaml --input-shape 1x80x1000 --by operator --format csv
  count_flops.py torchaudio.models:hubert_base --audio LibriSpeech/test-clean --device meta
  count_flops.py torchaudio.models:hubert_base --pseudo-input 160000
  count_flops.py s3prl:hubert --audio LibriSpeech/test-clean --convention superb
  count_flops.py hf:facebook/hubert-base-ls960 --pseudo-input
  count_flops.py --rules --format markdown

Exit code: 0; 2 for bad usage, a model that cannot be made or does not take its input, or with --strict an operator
without a rule."""
#: Samples of --pseudo-input without a number: ten seconds, as SUPERB's profiler has it.
PSEUDO_SAMPLES = 160000
#: With --preset quick: a second.
QUICK_SAMPLES = 16000
#: Flags that say how a count is shown or carried out, and not what is counted.
PRESENTATION = ("by", "depth", "details", "format", "log_dir", "preset", "quiet", "rules", "strict", "timeout")
#: Names below the model of the modules that a table shows, and of more than there are.
DEPTH, ALL = 2, 10**6


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    result.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Model: package.module:name or file.py:name (a class, a function that makes a model, or a model), "
        "s3prl:upstream or hf:name (with weights that are here already).",
    )
    group = result.add_argument_group("the model")
    group.add_argument(
        "--args", type=flag_types.path, metavar="FILE", help="YAML or JSON file of the constructor's arguments."
    )
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        type=flag_types.pair("KEY=VALUE", empty=True),
        metavar="KEY=VALUE",
        help="An argument of the constructor, in place of that of --args. Repeatable.",
    )
    group.add_argument("--method", default="forward", metavar="NAME", help="Method to call. Default: forward")
    group.add_argument(
        "--device", help="Device: cpu, cuda, cuda:N, or meta, which takes no memory and no time. Default: cpu"
    )
    group.add_argument("--train", action="store_true", help="Put the model into training mode. Default: evaluation")
    group.add_argument("--backward", action="store_true", help="Also count the backward, from ones for every output.")
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
        type=flag_types.whole(1),
        const=PSEUDO_SAMPLES,
        metavar="SAMPLES",
        help="Take an utterance of random numbers as input, of so many samples. Without a number: 160000.",
    )
    flags.add_setting(group, "batch_size", "Utterances of --pseudo-input. Default: 1", default=1)
    group.add_argument(
        "--sample-rate", type=flag_types.whole(1), default=16000, metavar="HZ", help="Sample rate. Default: 16000"
    )
    group.add_argument(
        "--hop", type=flag_types.whole(1), default=160, metavar="N", help="Samples of a frame. Default: 160"
    )
    group = result.add_argument_group("the count")
    group.add_argument("--by", choices=flops.BREAKDOWNS, default="module", help="Unit of a row. Default: module")
    group.add_argument(
        "--depth",
        type=_depth,
        metavar="N",
        help="Show modules down to N names below the model, or all. Default: 2; all with --format csv and json",
    )
    group.add_argument(
        "--convention",
        choices=("exact", "superb"),
        default="exact",
        help="How MACs are counted. superb: as SUPERB's profiler does, which also takes an attention's biases, "
        "scaling, mask, softmax and dropout for MACs. Default: exact",
    )
    group.add_argument("--strict", action="store_true", help="End with an error if an operator has no rule.")
    group.add_argument(
        "--register", type=flag_types.path, metavar="FILE", help="Python file that calls common.flops.rules.register."
    )
    group.add_argument("--rules", action="store_true", help="Print the table of rules, and stop.")
    quick = f"--device meta, and --pseudo-input {QUICK_SAMPLES} where no input is given"
    run = result.add_argument_group("the run")
    model_run.add_flags(run, folder="flops-<model>", quick=quick, timeout=None, measuring=False)
    return result


def _depth(text: str) -> int:
    return ALL if text == "all" else flag_types.whole(0)(text)


def main(arguments: argparse.Namespace, executor: Optional[Executor] = None) -> int:
    if arguments.rules:
        print(tables.rules(_rules(), arguments.format), end="")
        return EXIT_OK
    if not arguments.model:
        raise UserError("give a MODEL (--help shows examples), or --rules")
    has_input = arguments.input_shape or arguments.audio or arguments.pseudo_input
    model_run.set_quick(arguments, {"device": "meta", **({} if has_input else {"pseudo_input": QUICK_SAMPLES})})
    arguments.device = arguments.device or "cpu"
    if not (has_input or arguments.preset):
        raise UserError("give --input-shape, --audio or --pseudo-input")
    if arguments.audio and arguments.pseudo_input:
        raise UserError("give --audio or --pseudo-input, not both")
    counted = _counted(arguments, executor or Local())
    document = flops.merged([documents.typed(count["document"], CountedDocument) for count in counted])
    spoken = _buckets(counted, arguments)
    depth = arguments.depth
    if depth is None and arguments.format not in ("csv", "json"):
        depth = DEPTH
    breakdown = flops.breakdown(document, arguments.by, depth)
    print(tables.render(breakdown, arguments.by, arguments.format, spoken), end="")
    if arguments.format in ("csv", "json"):
        for name, reason in breakdown.not_counted:
            print(f"warning: not counted: {name} ({reason})", file=sys.stderr)
    _keep(arguments, document, spoken)
    return EXIT_OK


def _keep(arguments: argparse.Namespace, document: CountedDocument, spoken: List[tables.Bucket]) -> None:
    """Write the count, its tables and a page to a folder of --log-dir.

    What cannot be written is a warning: the table is on the screen.
    """
    record = {
        "model": arguments.model,
        "identity": {key: value for key, value in _flags(arguments).items() if key not in PRESENTATION},
        "by": arguments.by,
        "depth": arguments.depth,
        "document": as_written(document),
        "buckets": [vars(bucket) for bucket in spoken],
    }
    try:
        claim = records.start(arguments.log_dir, arguments.model)
        try:
            path = records.write(claim.path.parent, record)
        finally:
            claim.release()
    except UserError as error:
        print(f"warning: the count is not kept: {plain(error)}", file=sys.stderr)
        return
    count, breakdown = flops.read(path), flops.breakdown(document, arguments.by, arguments.depth)
    files = {
        f"flops.{ending}": tables.render(breakdown, arguments.by, format, spoken)
        for ending, format in (("md", "markdown"), ("csv", "csv"))
    }
    model_run.write(path, files, report.TITLE, [report.section(count, 0)], (), arguments)
    if not arguments.quiet:
        print(f"count: {path.with_suffix('.html')}", file=sys.stderr)


def _flags(arguments: argparse.Namespace) -> Dict[str, Any]:
    """Return the flags as JSON can hold them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}


def _counted(arguments: argparse.Namespace, executor: Executor) -> List[Record]:
    """Return the ``count`` records of a process that may end as the model likes.  Raises UserError."""
    python, here = interpreters.with_torch(), Path.cwd()
    task = Task("count", "flops", {"flags": _flags(arguments), "current": str(here)})
    resolved = settings.resolve({}, "cpu")
    *counts, end = executor.execute(task, python, here, resolved, arguments.timeout, lambda _: None)
    if end["status"] != "ok":
        raise UserError(f"{arguments.model}: {end['reason']}")
    return counts


def _buckets(counted: List[Record], arguments: argparse.Namespace) -> List[tables.Bucket]:
    """Return the buckets of --audio or --pseudo-input, [] without these."""
    rate = arguments.sample_rate
    spoken = [
        tables.Bucket(count["bucket"], count["samples"], count["macs"], _flops(count), rate)
        for count in counted
        if count["bucket"]
    ]
    return [*spoken, _all(spoken)] if len(spoken) > 1 else spoken


def _flops(count: Record) -> int:
    return flops.total(documents.typed(count["document"], CountedDocument)).flops


def _all(spoken: List[tables.Bucket]) -> tables.Bucket:
    return tables.Bucket(
        "all",
        [samples for bucket in spoken for samples in bucket.samples],
        [macs for bucket in spoken for macs in bucket.macs],
        sum(bucket.flops for bucket in spoken),
        spoken[0].sample_rate,
    )


def _rules() -> List[Dict[str, str]]:
    interpreters.with_torch()

    from common.flops import counter, rules  # noqa: F401  (the counter fills the table)

    return [
        {
            "operators": " ".join(name.replace("aten::", "", 1) for name in rule.operators),
            "macs": rule.macs,
            "flops": rule.flops,
            "reason": rule.reason,
        }
        for rule in [*rules.RULES, *(rule for _, rule in rules.GENERAL)]
    ]

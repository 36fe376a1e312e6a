"""The command `rnnt-bench profile`: from flags to the profile of a training step.

The steps run in a process of their own, since this one has no torch."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rnnt_bench.cli.parser import add_setting
from rnnt_bench.core import files, flag_types, settings, text
from rnnt_bench.core.arguments import Parser, refuse
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.jobs import job, session
from rnnt_bench.records.schema import as_written
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import commands, configuration
from rnnt_bench.tools.profile.rows import TOOL, Choice, Profile, answer
from rnnt_bench.tools.sizes import ICEFALL, loss_here, read_sizes

DESCRIPTION = """Show where a training step goes: time, memory and operations of each part of a model and its loss.

The model is a Conformer transducer of the size of icefall's pruned_transducer_stateless2 (--config icefall: that model
itself), or any that Python can import. docs/profile.md explains every column."""
EXAMPLES = """examples:
  rnnt-bench profile --config icefall --sort-utterance true --max-frames 30000
  rnnt-bench profile --batch-size 1 --size layers=4 --size encoder_dim=256 --loss torchaudio
  rnnt-bench profile --batch-size 4 --amp bfloat16 --optimizer
  rnnt-bench profile --depth 3
  rnnt-bench profile --model recipe.py:Model --arg vocab_size=500 --loss torchaudio --depth 2

Exit code: 0; 1 if the batch does not fit; 2 for bad usage, or if a step fails."""
#: Values of the flags that are not given, by kind of device.
PRESETS: dict[str, dict[str, int]] = {
    "cuda": {"batch_size": 30, "max_frames": 30000, "steps": 20, "warmup": 5, "trace_steps": 2},
    "cpu": {"batch_size": 1, "max_frames": 2000, "steps": 5, "warmup": 1, "trace_steps": 2},
}
#: Their values with --preset quick, which also makes a smaller model.
QUICK = {"batch_size": 1, "max_frames": 1000, "steps": 2, "warmup": 1, "trace_steps": 1}


def parser() -> Parser:
    """Return the parser of the flags of `profile`."""
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    group = result.add_argument_group("batches")
    add_setting(
        group,
        "shape_file",
        f"File of (frames, U) or (T, U) of every utterance, as {command('shapes')} writes it. For (T, U), an "
        "utterance gets the fewest feature frames that give T encoder frames. Default: the suite's "
        "data/shape_info.features.pt",
        default=files.ROOT / "data" / "shape_info.features.pt",
    )
    add_setting(
        group,
        "sort_utterance",
        "Sort utterances by length and fill batches up to --max-frames. Default: false",
        default=False,
    )
    help_text = "Most feature frames in a batch, the sum over its utterances"
    add_setting(
        group, "max_frames", f"{help_text}. Default: {_by_device('max_frames')}", metavar="K"
    )
    help_text = "Utterances in a batch"
    add_setting(
        group, "batch_size", f"{help_text}. Default: {_by_device('batch_size')}", metavar="K"
    )
    help_text = "Number of batches, drawn from all and used in turn"
    add_setting(group, "num_batches", f"{help_text}. Default: 1", default=1)
    group = result.add_argument_group("the model")
    group.add_argument(
        "--config",
        type=flag_types.path,
        metavar="FILE",
        help="YAML or JSON file of the sizes of the Conformer transducer; or icefall, for icefall's own Conformer "
        "(relative positions, BasicNorm, balancers) at its own sizes.",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="Model to profile: package.module:name or file.py:name. It is called with features (N, frames, F), their "
        "lengths, symbols (N, U+1) with a blank first, and their lengths. It returns its loss, or logits (N, T, "
        "U+1, V), which may be the first of several outputs.",
    )
    _add_pairs(group, "--size", "KEY=VALUE", "A size, in place of that of --config. Repeatable.")
    _add_pairs(group, "--arg", "KEY=VALUE", "An argument of --model. Repeatable.")
    _add_pairs(
        group,
        "--label",
        "NAME=PATTERN",
        "Label modules by their dotted names; * matches within a name. Repeatable. Joiner and losses are always "
        "labelled. Default: encoder, embed, layers, their feed-forwards, attention and convolution, and decoder",
    )
    group.add_argument(
        "--depth",
        type=flag_types.Whole(1),
        metavar="K",
        help="Label every module whose dotted name has at most K parts, in place of --label.",
    )
    group.add_argument(
        "--loss",
        default=Choice().loss,
        help="A row of the benchmarks that runs in this Python: fast_rnnt-pruned, or an exact one such as torchaudio, "
        "optimized_transducer, fused. Default: fast_rnnt-pruned",
    )
    add_setting(group, "prune_range", "Symbols that a pruned loss keeps for each frame. Default: 5")
    group.add_argument(
        "--dropout", action="store_true", help="Keep the model's dropout. Default: --no-dropout"
    )
    group.add_argument(
        "--no-dropout", dest="dropout", action="store_false", help="Set every dropout to 0."
    )
    help_text = "Run the model under autocast; losses stay in float32. Default: none"
    group.add_argument("--amp", choices=("bfloat16",), help=help_text)
    group.add_argument("--optimizer", action="store_true", help="Also run AdamW's step.")
    group = result.add_argument_group("the run")
    add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    help_text = f"Timed steps, with labels. Default: {_by_device('steps')}"
    group.add_argument("--steps", type=flag_types.Whole(1), metavar="K", help=help_text)
    help_text = f"Steps before the timed ones. Default: {_by_device('warmup')}"
    group.add_argument("--warmup", type=flag_types.Whole(0), metavar="K", help=help_text)
    help_text = "Steps under torch.profiler. Default: 2"
    group.add_argument("--trace-steps", type=flag_types.Whole(1), metavar="K", help=help_text)
    quick = "2 layers of the Conformer transducer, one utterance, 2 steps"
    commands.add_flags(
        group, seed="Seed of inputs and weights", folder="profile-<size>", quick=quick, timeout=None
    )
    return result


def _add_pairs(group: Any, flag: str, form: str, help_text: str) -> None:
    """Add a repeatable flag that takes pairs of a form such as KEY=VALUE."""
    pair = flag_types.key_value(form)
    group.add_argument(flag, action="append", default=[], type=pair, metavar=form, help=help_text)


def _by_device(key: str) -> str:
    """Return the default of a flag for --help: "30 (cuda), 1 (cpu)"."""
    return ", ".join(f"{values[key]} ({device})" for device, values in PRESETS.items())


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Profile a training step; return the exit code."""
    interpreters.with_torch("torchaudio", "yaml")
    is_sorted = arguments.sort_utterance
    # The flag that bounds a batch, and the one that does so with the other --sort-utterance.
    key, unused = ("max_frames", "batch_size") if is_sorted else ("batch_size", "max_frames")
    if getattr(arguments, unused) is not None:  # given by the user: `set_quick` fills in None later
        flag = f"--{unused.replace('_', '-')} {getattr(arguments, unused)}"
        raise UserError(
            f"{flag}: is of --sort-utterance {str(not is_sorted).lower()}; give that too"
        )
    if arguments.label and arguments.depth is not None:
        raise UserError("give --label or --depth, not both")
    device = interpreters.resolve_device(arguments.device, [Path(sys.executable)])
    commands.set_quick(arguments, QUICK, others=PRESETS[device.partition(":")[0]])
    choice = chosen(arguments)
    size = {key: getattr(arguments, key), "sort_utterance": is_sorted}
    values = {
        "num_batches": arguments.num_batches,
        "seed": arguments.seed,
        "threads": arguments.threads,
        "prune_range": arguments.prune_range,
        "vocab_size": choice.sizes.vocab_size,
        "encoder_dim": choice.sizes.joiner_dim,
        "shape_file": str(arguments.shape_file.absolute()),
        "rounds": 1,
    }
    resolved = settings.resolve({**values, **size}, device)
    # Without these variables, the system maps the memory of large tensors anew in each step.
    reuse = settings.REUSE_VARIABLES if resolved.allocator == "reuse" else {}
    name = f"{key.replace('_', '-')} {size[key]}"
    tasks = [job.Task(name, TOOL, as_written(choice), environment=reuse)]
    config = Profile(choice=choice, sizes={name: size})
    return commands.measured(
        TOOL, resolved.suffix, config, tasks, resolved, arguments, answer, executor
    )


def chosen(arguments: argparse.Namespace) -> Choice:
    """Return what to profile, and how, as the flags choose it.  Raises UserError."""
    config = str(arguments.config or "")
    changes = arguments.size
    if arguments.preset and not (arguments.model or config or changes):
        changes = [("layers", "2")]  # --preset quick makes a smaller model
    if config == ICEFALL and arguments.model:
        raise UserError(f"--config {config}: is a model, as --model is; give one of them")
    if arguments.arg and not arguments.model:
        raise UserError(
            "--arg: is an argument of --model; give that too, or --size for the Conformer transducer"
        )
    row = loss_here(arguments.loss, "--loss")
    if row.kind != "pruned":
        reason = f"is for a pruned loss; {row.name} is none"
        refuse(parser(), arguments, ("prune_range",), reason)
    values = {}
    for key, value in arguments.arg:
        parsed = configuration.parsed(value, f"--arg {key}")
        # The name of a file is made absolute, as that of a model's file is.
        values[key] = os.path.abspath(parsed) if os.path.isfile(str(parsed)) else parsed
    return Choice(
        sizes=read_sizes(config, changes, "--size"),
        loss=arguments.loss,
        model=configuration.python_name(arguments.model, config=Path()) if arguments.model else "",
        config=ICEFALL if config == ICEFALL else "",
        arguments=values,
        labels=text.gathered(arguments.label),
        depth=arguments.depth,
        steps=arguments.steps,
        warmup=arguments.warmup,
        trace_steps=arguments.trace_steps,
        dropout=arguments.dropout,
        amp=arguments.amp is not None,
        optimizer=arguments.optimizer,
    )

"""The command profile_model.py: from flags to the profile of a training step.  No torch until something is profiled."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from common.cli import ending, flags
from common.cli.parser import Parser
from common.core import flag_types, paths, settings
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.core.files import another, read_text, write_whole
from common.core.implementations import find
from common.core.settings import Settings
from common.core.text import plain
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.spec import Task
from common.records.documents import typed
from common.records.run import remove
from common.setup import interpreters
from common.show import page
from common.system.locks import Claim
from common.tools import commands as model_run
from common.tools import configuration
from common.tools.profile import records
from common.tools.profile import section as report
from common.tools.profile import table as tables
from common.tools.profile.documents import Profile
from common.tools.profile.rows import Size, profile

DESCRIPTION = """Show where a training step goes: time, memory and operations of each part of a model and its loss.

The model is a Conformer transducer of the size of icefall's pruned_transducer_stateless2 (--config icefall: that model
itself), or any that Python can import. docs/profile.md explains every column."""
EXAMPLES = """examples:
  profile_model.py --config icefall --sort-utterance true --max-frames 30000
  profile_model.py --batch-size 1 --size layers=4 --size encoder_dim=256 --loss torchaudio
  profile_model.py --sweep batch-size=1,2,4 --amp bfloat16 --optimizer
  profile_model.py --depth 3 --checkpoint 'encoder.conformer.conformer_layers.*'
  profile_model.py --model recipe.py:Model --arg vocab_size=500 --loss torchaudio --depth 2

Exit code: 0; 1 if a size of --sweep does not run; 2 for bad usage, or if the only size does not run."""
#: By kind of device: what of the size depends on it.
PRESETS: Dict[str, Dict[str, int]] = {
    "cuda": {"batch_size": 30, "max_frames": 30000, "steps": 20, "warmup": 5},
    "cpu": {"batch_size": 1, "max_frames": 2000, "steps": 5, "warmup": 1},
}
#: Size of a batch -> whether it is of sorted utterances.
SIZES = {"batch-size": False, "max-frames": True}
LOSS = "fast_rnnt-pruned"

#: With --preset quick, of flags that are not given: a smaller batch in either kind, and a smaller model.
QUICK: Dict[str, Union[int, bool]] = {"steps": 2, "warmup": 1, "trace_steps": 1, "limits": False}
QUICK_BATCH = {False: {"batch_size": 1}, True: {"max_frames": 1000}}
QUICK_SIZE = [("layers", "2")]


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    group = result.add_argument_group("batches")
    flags.add_setting(
        group,
        "shape_file",
        "File with (frames, U) or (T, U) of every utterance, as generate_shape_info.py writes it. For T encoder "
        "frames, the fewest feature frames that give them are taken. Default: the suite's data/shape_info.features.pt",
        default=paths.ROOT / "data" / "shape_info.features.pt",
    )
    flags.add_setting(
        group,
        "sort_utterance",
        "Sort utterances by length and fill batches up to --max-frames. Default: false",
        default=False,
    )
    flags.add_setting(
        group, "max_frames", f"Most feature frames in a batch. Default: {_by_device('max_frames')}", metavar="K"
    )
    flags.add_setting(group, "batch_size", f"Utterances in a batch. Default: {_by_device('batch_size')}")
    flags.add_setting(group, "num_batches", "Number of batches, drawn from all and used in turn. Default: 1", default=1)
    seed = settings.SETTINGS["seed"].default
    flags.add_setting(group, "seed", f"Seed of inputs and weights. Default: {seed}", default=seed)
    group.add_argument(
        "--sweep",
        type=_sizes,
        metavar="KEY=A,B,...",
        help="Profile each of these sizes; KEY is batch-size or max-frames.",
    )
    group = result.add_argument_group("the model")
    group.add_argument(
        "--config",
        type=flag_types.path,
        metavar="FILE",
        help="YAML or JSON file of the sizes of the Conformer transducer; or icefall, for icefall's own Conformer "
        "(relative positions, BasicNorm, balancers) at its own sizes.",
    )
    group.add_argument(
        "--size",
        action="append",
        default=[],
        type=flag_types.pair("KEY=VALUE"),
        metavar="KEY=VALUE",
        help="A size, in place of that of --config. Repeatable.",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="Model to profile: package.module:name or file.py:name. It is called with features (N, frames, F), their "
        "lengths, symbols (N, U+1) with a blank first, and their lengths. It returns its loss, or logits (N, T, "
        "U+1, V) first.",
    )
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        type=flag_types.pair("KEY=VALUE"),
        metavar="KEY=VALUE",
        help="An argument of --model. Repeatable.",
    )
    group.add_argument(
        "--loss",
        default=LOSS,
        help="A row of the benchmarks: fast_rnnt-pruned, k2-pruned, or an exact one such as torchaudio, "
        "optimized_transducer, fused. Default: fast_rnnt-pruned",
    )
    flags.add_setting(group, "prune_range", "Symbols that a pruned loss keeps for each frame. Default: 5")
    group.add_argument("--dropout", action="store_true", help="Keep the model's dropout. Default: --no-dropout")
    group.add_argument("--no-dropout", dest="dropout", action="store_false", help="Set every dropout to 0.")
    group.add_argument(
        "--amp", choices=("bfloat16",), help="Run the model under autocast; losses stay in float32. Default: none"
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="Run torch.compile on each labelled module that holds no other labelled one.",
    )
    group.add_argument("--optimizer", action="store_true", help="Also run AdamW's step.")
    group.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Compute the forward of these modules again in the backward, to save memory. Repeatable.",
    )
    group = result.add_argument_group("labels")
    group.add_argument(
        "--label",
        action="append",
        default=[],
        type=flag_types.pair("NAME=PATTERN"),
        metavar="NAME=PATTERN",
        help="Label modules by their dotted names; * matches within a name. Repeatable. Joiner and losses are always "
        "labelled. Default: encoder, embed, layers, their feed-forwards, attention and convolution, and decoder",
    )
    group.add_argument(
        "--depth",
        type=flag_types.whole(1),
        metavar="K",
        help="Label every module whose dotted name has at most K parts, in place of --label.",
    )
    group = result.add_argument_group("the run")
    flags.add_setting(group, "device", "Device to measure on: auto, cpu, cuda or cuda:N. Default: auto")
    flags.add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    group.add_argument(
        "--steps",
        type=flag_types.whole(1),
        metavar="K",
        help=f"Timed steps, with labels. Default: {_by_device('steps')}",
    )
    group.add_argument(
        "--warmup",
        type=flag_types.whole(0),
        metavar="K",
        help=f"Steps before the timed ones. Default: {_by_device('warmup')}",
    )
    group.add_argument(
        "--trace-steps", type=flag_types.whole(1), metavar="K", help="Steps under torch.profiler. Default: 2"
    )
    group.add_argument(
        "--limits",
        type=flag_types.str2bool,
        metavar="BOOL",
        help="Measure the device's matrix rate, which 'of limit' needs. Default: true",
    )
    quick = "2 layers of the Conformer transducer, one utterance, 2 steps, no limits"
    model_run.add_flags(group, folder="profile-<size>", quick=quick, timeout=None)
    return result


def _by_device(key: str) -> str:
    """Return the default of a flag for --help: "30 (cuda), 1 (cpu)"."""
    return ", ".join(f"{values[key]} ({device})" for device, values in PRESETS.items())


def _sizes(text: str) -> Tuple[str, List[int]]:
    key, _, listed = text.partition("=")
    if key not in SIZES or not listed:
        raise argparse.ArgumentTypeError(f"give {' or '.join(f'{key}=A,B' for key in SIZES)}, not {text!r}")
    return key, [flag_types.whole(1)(word) for word in listed.split(",")]


def main(arguments: argparse.Namespace, executor: Optional[Executor] = None) -> int:
    interpreters.with_torch("torchaudio")
    for key, sorts in SIZES.items():
        given = getattr(arguments, key.replace("-", "_"))
        if given is not None and arguments.sort_utterance != sorts:
            wanted = f"--sort-utterance {str(sorts).lower()}"
            raise UserError(f"--{key} {given}: is of {wanted}; give that too, or leave it out")
    if arguments.label and arguments.depth is not None:
        raise UserError("give --label or --depth, not both")
    _complete(arguments)
    choice = _choice(arguments)
    return profiled(choice, arguments, executor or Local())


def _complete(arguments: argparse.Namespace) -> None:
    """Set what --preset quick says, and the defaults of flags that it may set."""
    model_run.set_quick(arguments, {**QUICK, **({} if arguments.sweep else QUICK_BATCH[arguments.sort_utterance])})
    if arguments.preset and not (arguments.model or arguments.config or arguments.size):
        arguments.size = QUICK_SIZE
    arguments.limits = True if arguments.limits is None else arguments.limits
    arguments.trace_steps = arguments.trace_steps or 2


def profiled(choice: Any, arguments: argparse.Namespace, executor: Executor) -> int:
    """Profile, and return the exit code.

    choice: a common.tools.profile.measure.Choice, without the numbers of steps."""
    device = interpreters.resolve_device(arguments.device, [Path(sys.executable)])
    size = PRESETS[device.partition(":")[0]]
    given = {key: value if getattr(arguments, key) is None else getattr(arguments, key) for key, value in size.items()}
    choice = replace(choice, steps=given["steps"], warmup=given["warmup"])
    every = [_settings(arguments, device, choice.sizes, given)]
    if arguments.sweep:
        key, values = arguments.sweep
        swept = [{**given, key.replace("-", "_"): value, "sort_utterance": SIZES[key]} for value in values]
        every = [_settings(arguments, device, choice.sizes, sizes) for sizes in swept]
    claim, cells = _opened(choice, every, arguments)
    folder = claim.path.parent
    stopped: Union[KeyboardInterrupt, UserError, None] = None
    try:
        try:
            ending.warn_of_load(executor, every[0])
            _measure(choice, every, folder, arguments, executor, cells)
        except (KeyboardInterrupt, UserError) as error:
            if not cells:
                raise
            stopped = error
        ended = _sorted(cells)
        if len(every) == 1 and ended[0][1] is None:
            (folder / records.FILE_NAME).unlink()
            raise UserError(ended[0][2])
        _write(ended, folder, arguments)
    finally:
        claim.release()
        if {path.name for path in folder.iterdir()} == {records.HEADER_NAME}:
            remove(folder / records.HEADER_NAME)
    if isinstance(stopped, KeyboardInterrupt):
        print(f"interrupted: {len(ended)} of {len(every)} sizes were profiled; --resume goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if stopped:
        raise stopped
    return EXIT_OK if all(profiled_size for _, profiled_size, _ in ended) else EXIT_FAILED


def _opened(choice: Any, every: Sequence[Settings], arguments: argparse.Namespace) -> Tuple[Claim, Dict[int, Size]]:
    """Return the lock of a new folder, or of the one to go on in, and the cells that are profiled there."""
    settings_of = [resolved.to_json() for resolved in every]
    identity = {"choice": choice.to_json(), "settings": settings_of, "limits": arguments.limits}
    if not arguments.resume:
        suffix = f"sweep-{arguments.sweep[0]}" if arguments.sweep else every[0].suffix
        return records.start(arguments.log_dir, f"profile-{suffix}", identity), {}
    claim, documents = records.resume(arguments.log_dir, identity)
    known = {document.size: document for document in documents if document.is_measured}
    sizes = enumerate(map(_words, every))
    return claim, {number: (words, profile(known[words]), "") for number, words in sizes if words in known}


def _words(size: Settings) -> str:
    """Return "max-frames 1000" or "batch-size 4"."""
    return f"max-frames {size.max_frames}" if size.sort_utterance else f"batch-size {size.batch_size}"


def _measure(
    choice: Any,
    every: Sequence[Settings],
    folder: Path,
    arguments: argparse.Namespace,
    executor: Executor,
    cells: Dict[int, Size],
) -> None:
    """Profile each of the settings that has no cell, and put its words, its profile or the reason into `cells`.  All
    cells are written to disk with each."""
    limits = next((earlier.document.limits for _, earlier, _ in cells.values() if earlier), arguments.limits)
    for number in [number for number in range(len(every)) if number not in cells]:
        resolved = every[number]
        words = _words(resolved)
        if not arguments.quiet:
            print(f"profiling {words}: {choice.implementation.name} on {resolved.device} ...", file=sys.stderr)
        task = Task(words, "profile", {"choice": choice.to_json(), "limits": limits})
        target, python = folder / str(number) if number else folder, Path(sys.executable)
        *lines, end = executor.execute(task, python, target, resolved, arguments.timeout, lambda text: None)
        if end["status"] == "ok":
            document = typed({**lines[0]["document"], "size": words}, Profile)
            limits = document.limits
            cells[number] = words, profile(document), ""
        else:
            print(f"warning: {words}: {plain(end['reason'])}", file=sys.stderr)
            cells[number] = words, None, end["reason"]
        write_whole(another("--log-dir", "folder"), (folder / records.FILE_NAME, tables.json(_sorted(cells))))


def _sorted(cells: Mapping[int, Size]) -> List[Size]:
    return [cells[number] for number in sorted(cells)]


def _choice(arguments: argparse.Namespace) -> Any:
    """Return a common.tools.profile.measure.Choice.  Raises UserError."""
    from common.tools import loading
    from common.tools.profile import transducer
    from common.tools.profile.measure import MODELS, Choice

    named = str(arguments.config) if str(arguments.config) in MODELS else ""
    given = loading.read_arguments(arguments.config) if arguments.config and not named else {}
    sizes = transducer.sizes(given, str(arguments.config))
    of_flags = {key: loading.parse_value(value, f"--size {key}") for key, value in arguments.size}
    sizes = replace(sizes, **vars(transducer.sizes({**given, **of_flags}, "--size")))
    if named and arguments.model:
        raise UserError(f"--config {named}: is a model, as --model is; give one of them")
    if arguments.arg and not arguments.model:
        raise UserError("--arg: is an argument of --model; give that too, or --size for the Conformer transducer")
    implementation = find(arguments.loss)
    patterns: Dict[str, Tuple[str, ...]] = {}
    for name, pattern in arguments.label:
        patterns[name] = (*patterns.get(name, ()), pattern)
    given = {key: loading.parse_value(value, f"--arg {key}") for key, value in arguments.arg}
    return Choice(
        sizes,
        implementation,
        model=configuration.python_name(arguments.model, Path()) if arguments.model else "",
        config=named,
        arguments=_located(given),
        labels=patterns,
        depth=arguments.depth,
        trace_steps=arguments.trace_steps,
        dropout=arguments.dropout,
        amp=arguments.amp is not None,
        compile=arguments.compile,
        optimizer=arguments.optimizer,
        checkpoint=tuple(arguments.checkpoint),
    )


def _located(given: Any) -> Any:
    """Return arguments of a model with absolute paths for the files that they name."""
    if isinstance(given, dict):
        return {key: _located(value) for key, value in given.items()}
    if isinstance(given, list):
        return [_located(value) for value in given]
    return os.path.abspath(given) if isinstance(given, str) and os.path.isfile(given) else given


def _settings(arguments: argparse.Namespace, device: str, sizes: Any, batch: Mapping[str, Any]) -> Settings:
    """Return the settings of one size.  batch: the settings of that size."""
    given = {name: getattr(arguments, name) for name in ("sort_utterance", "num_batches", "seed", "threads")}
    given["prune_range"] = arguments.prune_range
    shape_file = str(arguments.shape_file.absolute())
    model = {"vocab_size": sizes.vocab_size, "encoder_dim": sizes.joiner_dim, "shape_file": shape_file}
    return settings.resolve({**given, **model, "rounds": 1, **batch}, device)


def _write(cells: List[Size], folder: Path, arguments: argparse.Namespace) -> None:
    """Print the tables, and write them, the rows, the documents and the page to the folder."""
    shown = tables.render(cells, "table")
    print(tables.render(cells, arguments.format), end="")
    folders = [folder / str(number) if number else folder for number in range(len(cells))]
    tables_of_operators = [path / f"{path.name}.txt" for path in folders]
    operators = [read_text(path) for path in tables_of_operators if path.exists()]
    title, sections = report.TITLE, report.of_cells(cells, folder.name, folder / records.FILE_NAME)
    files = {
        "profile-filtered.txt": shown,
        "profile.txt": "\n".join([shown, *operators]),
        "profile.csv": tables.csv(cells),
        records.FILE_NAME: tables.json(cells),
    }
    try:
        files[report.PAGE_NAME] = page.assembled(sections, folder, title, f"{folder.name}.")
    except UserError as error:  # no jinja2: the numbers are there
        print(f"warning: {plain(error)}", file=sys.stderr)
    for name, text in files.items():
        write_whole(another("--log-dir", "folder"), (folder / name, text))
    if not arguments.quiet:
        print(f"profile: {folder / report.PAGE_NAME}", file=sys.stderr)

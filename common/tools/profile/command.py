"""The command profile_model.py: from flags to the profile of a training step.  No torch until something is profiled."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from common.cli import devices, ending, flag_types
from common.cli.flags import BOOL, SWITCH, by_preset, repeatable
from common.cli.parser import Parser
from common.core import paths, settings
from common.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.core.files import another, read_text, write_whole
from common.core.implementations import find
from common.core.settings import Settings
from common.core.text import plain
from common.jobs import carried
from common.jobs.executor import Executor
from common.jobs.spec import Task
from common.jobs.spread import OnceMore, spread
from common.plots import png
from common.records.run import remove
from common.report import page
from common.setup import interpreters
from common.setup.interpreters import Choice as Python
from common.system.locks import Claim
from common.tools import commands as model_run
from common.tools import configuration
from common.tools.profile import records
from common.tools.profile import section as report
from common.tools.profile import table as tables
from common.tools.profile.plot import figures
from common.tools.profile.rows import Size, profile

DESCRIPTION = """Where a training step goes: time, memory and operations of each part of a model and its loss.

The model is a Conformer transducer (of the size of icefall's pruned_transducer_stateless2; with --config icefall that
model itself) or any that Python can import; docs/profile.md explains every column."""
EXAMPLES = """examples:
  profile_model.py --config icefall --sort-utterance true --max-frames 30000
  profile_model.py --batch-size 1 --size layers=4 --size encoder_dim=256 --loss torchaudio
  profile_model.py --sweep batch-size=1,2,4 --amp bfloat16 --optimizer
  profile_model.py --depth 3 --checkpoint 'encoder.conformer.conformer_layers.*'
  profile_model.py --model recipe.py:Model --arg vocab_size=500 --loss torchaudio --depth 2

Exit code: 0; 1 where a size of --sweep does not run; 2 for bad usage, or where the only size does not run."""
#: By kind of device: what of the size depends on it.
PRESETS: Dict[str, Dict[str, Any]] = {
    "cuda": {"batch_size": 30, "max_frames": 30000, "steps": 20, "warmup": 5},
    "cpu": {"batch_size": 1, "max_frames": 2000, "steps": 5, "warmup": 1},
}
#: Size of a batch -> whether it is of sorted utterances.
SIZES = {"batch-size": False, "max-frames": True}
LOSS = "fast_rnnt-pruned"


#: See common.cli.flags.add_table.
HELP = f"""
batches
  --shape-file FILE: (frames, U) or (T, U) of every utterance, as generate_shape_info.py writes it; T encoder frames are
    the fewest feature frames that give them. Default: the suite's shape_info.features.pt
  --sort-utterance: batches of --max-frames, sorted by length. Default: false
  --max-frames K: feature frames. Default: {by_preset("max_frames", PRESETS)}
  --batch-size N: utterances. Default: {by_preset("batch_size", PRESETS)}
  --num-batches K: drawn from all, in turn. Default: 1
  --seed: of inputs and weights
  --sweep KEY=A,B,...: profile each of these sizes, KEY being {" or ".join(SIZES)}
the model
  --config FILE: sizes of the Conformer transducer, YAML or JSON; icefall: icefall's own Conformer (relative positions,
    BasicNorm, balancers), at its own sizes
  --size KEY=VALUE: one of them, over --config; repeatable
  --model MODULE:NAME: package.module:name or file.py:name of a model, called with features (N, frames, F), their
    lengths, symbols (N, U+1) with a blank first, and their lengths; it returns its loss, or logits (N, T, U+1, V) first
  --arg KEY=VALUE: an argument of --model; repeatable
  --loss: a row of the benchmarks: fast_rnnt-pruned, k2-pruned, or an exact one such as torchaudio,
    optimized_transducer, fused. Default: {LOSS}
  --prune-range S: of a pruned loss. Default: 5
  --dropout: keep the model's dropout
  --no-dropout: set every dropout to 0. The default
  --amp: autocast of the model; losses are float32. Default: none
  --compile: torch.compile each labelled module that holds no other labelled one
  --optimizer: AdamW's step too
  --checkpoint PATTERN: compute the forward of these modules again in the backward; repeatable
labels
  --label NAME=PATTERN: label modules by their dotted names, * within a name; repeatable. Default: encoder, embed,
    layers, their feed-forwards, attention and convolution, and decoder; joiner and losses are always labelled
  --depth K: instead: every module of at most K names
the run
  --device: auto, cpu, cuda or cuda:N. Default: auto
  --threads K: of torch on a CPU. Default: all
  --steps K: timed, with labels. Default: {by_preset("steps", PRESETS)}
  --warmup K: before them. Default: {by_preset("warmup", PRESETS)}
  --trace-steps K: under torch.profiler. Default: 2
  --limits: measure the device's matrix rate, which 'of limit' needs. Default: true
"""
#: With --preset quick, of flags that are not given: a smaller batch in either kind, and a smaller model.
QUICK: Dict[str, Any] = {"steps": 2, "warmup": 1, "trace_steps": 1, "limits": False}
QUICK_BATCH = {False: {"batch_size": 1}, True: {"max_frames": 1000}}
QUICK_SIZE = [("layers", "2")]


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    takes: Dict[str, Any] = {
        **dict.fromkeys(("--size", "--arg"), repeatable(flag_types.pair("KEY=VALUE"))),
        **dict.fromkeys(("--model", "--loss"), str),
        **dict.fromkeys(("--dropout", "--compile", "--optimizer"), SWITCH),
        **dict.fromkeys(("--depth", "--steps", "--trace-steps"), flag_types.whole(1)),
        "--sort-utterance": BOOL,
        "--sweep": _sizes,
        "--config": flag_types.path,
        "--no-dropout": {"dest": "dropout", "action": "store_false"},
        "--amp": ("bfloat16",),
        "--checkpoint": repeatable(str),
        "--label": repeatable(flag_types.pair("NAME=PATTERN")),
        "--warmup": flag_types.whole(0),
    }
    quick = "2 layers of the Conformer transducer, one utterance, 2 steps, no limits"
    model_run.add_flags(result, HELP, takes, folder="profile-<size>", quick=quick, timeout=None)
    shapes = paths.ROOT / "shape_info.features.pt"
    result.set_defaults(shape_file=shapes, sort_utterance=False, num_batches=1, loss=LOSS)
    return result


def _sizes(text: str) -> Tuple[str, List[int]]:
    key, _, listed = text.partition("=")
    if key not in SIZES or not listed:
        raise argparse.ArgumentTypeError(f"give {' or '.join(f'{one}=A,B' for one in SIZES)}, not {text!r}")
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
    files = carried.files([choice.model, choice.arguments]) if arguments.executor == "ray" else ()
    return devices.on_each_kind(arguments, partial(profiled, choice, files), executor=executor)


def _complete(arguments: argparse.Namespace) -> None:
    """Set what --preset quick says, and the defaults of flags that it may set."""
    model_run.set_quick(arguments, {**QUICK, **({} if arguments.sweep else QUICK_BATCH[arguments.sort_utterance])})
    if arguments.preset and not (arguments.model or arguments.config or arguments.size):
        arguments.size = QUICK_SIZE
    arguments.limits = True if arguments.limits is None else arguments.limits
    arguments.trace_steps = arguments.trace_steps or 2


def profiled(choice: Any, files: Tuple[str, ...], arguments: argparse.Namespace, executor: Executor) -> int:
    """Profile on the devices of one executor, and return the exit code.

    choice: a common.tools.profile.measure.Choice, without the numbers of steps; files: those that it names."""
    device = executor.resolve_device(arguments.device, {"": Python(executor.python())})
    size = PRESETS[device.partition(":")[0]]
    given = {key: value if getattr(arguments, key) is None else getattr(arguments, key) for key, value in size.items()}
    choice = replace(choice, steps=given["steps"], warmup=given["warmup"])
    every = [_settings(arguments, device, choice.sizes, given)]
    if arguments.sweep:
        key, values = arguments.sweep
        swept = [{**given, key.replace("-", "_"): value, "sort_utterance": SIZES[key]} for value in values]
        every = [_settings(arguments, device, choice.sizes, one) for one in swept]
    claim, cells = _opened(choice, every, arguments, executor)
    folder = claim.path.parent
    stopped: Union[KeyboardInterrupt, UserError, None] = None
    try:
        try:
            ending.warn_of_load(executor, every[0])
            _measure(choice, files, every, folder, arguments, executor, cells)
        except (KeyboardInterrupt, UserError) as error:
            if not cells:
                raise
            stopped = error
        found = _sorted(cells)
        if len(every) == 1 and found[0][1] is None:
            (folder / records.FILE_NAME).unlink()
            raise UserError(found[0][2])
        _write(found, folder, arguments)
    finally:
        claim.release()
        if {path.name for path in folder.iterdir()} == {records.HEADER_NAME}:
            remove(folder / records.HEADER_NAME)
    if isinstance(stopped, KeyboardInterrupt):
        print(f"interrupted: {len(found)} of {len(every)} sizes were profiled; --resume goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if stopped:
        raise stopped
    return EXIT_OK if all(one for _, one, _ in found) else EXIT_FAILED


def _opened(
    choice: Any, every: Sequence[Settings], arguments: argparse.Namespace, executor: Executor
) -> Tuple[Claim, Dict[int, Size]]:
    """The lock of a new folder, or of the one to go on in, and the cells that are profiled there."""
    machine = executor.machine and {key: executor.machine.get(key) for key in ("cpu", "cores", "gpu")}
    settings_of = [one.to_json() for one in every]
    identity = {"choice": choice.to_json(), "settings": settings_of, "limits": arguments.limits, "machine": machine}
    if not arguments.resume:
        of = f"sweep-{arguments.sweep[0]}" if arguments.sweep else every[0].suffix
        return records.start(arguments.log_dir, f"profile-{of}", identity), {}
    claim, documents = records.resume(arguments.log_dir, identity)
    known = {one["size"]: one for one in documents if one.get("spans")}
    places = {place: _words(of) for place, of in enumerate(every)}
    return claim, {place: (words, profile(known[words]), "") for place, words in places.items() if words in known}


def _words(of: Settings) -> str:
    return f"max-frames {of.max_frames}" if of.sort_utterance else f"batch-size {of.batch_size}"


def _measure(
    choice: Any,
    files: Tuple[str, ...],
    every: Sequence[Settings],
    folder: Path,
    arguments: argparse.Namespace,
    executor: Executor,
    cells: Dict[int, Size],
) -> None:
    """Put a cell for each of the settings that has none into `cells`: its words, and its profile or why there is none.
    All that there are go to disk with each."""
    lock, once_more = RLock(), OnceMore()
    done = [found.document for _, found, _ in cells.values() if found]
    known = {str(of.get("node", "")): of["limits"] for of in done}  # by device

    def serve(lane: Executor, place: int) -> None:
        of = every[place]
        words = _words(of)
        with lock:
            where = f" of {lane.label}" if lane.label else ""
            if not arguments.quiet:
                print(f"profiling {words}: {choice.implementation.name} on {of.device}{where} ...", file=sys.stderr)
            limits = known.get(lane.label, arguments.limits)
        task = Task(words, "profile", {"choice": choice.to_json(), "limits": limits}, files=files)
        target = folder / str(place) if place else folder
        limit = arguments.timeout
        *found, end = once_more.execute(place, lane, task, executor.python(), target, of, limit, lambda text: None)
        with lock:
            if end["status"] == "ok":
                document = {**found[0]["document"], **({"node": lane.label} if lane.label else {})}
                known[lane.label] = document["limits"]
                cells[place] = words, profile(document), ""
            else:
                print(f"warning: {words}: {plain(end['reason'])}", file=sys.stderr)
                cells[place] = words, None, end["reason"]
            write_whole(another("--log-dir", "folder"), (folder / records.FILE_NAME, tables.json(_sorted(cells))))

    spread(executor.lanes(), [place for place in range(len(every)) if place not in cells], serve)


def _sorted(cells: Mapping[int, Size]) -> List[Size]:
    return [cells[place] for place in sorted(cells)]


def _choice(arguments: argparse.Namespace) -> Any:
    """A common.tools.profile.measure.Choice.  Raises UserError."""
    from common.tools import loading
    from common.tools.profile import transducer
    from common.tools.profile.measure import MODELS, Choice

    named = str(arguments.config) if str(arguments.config) in MODELS else ""
    given: Dict[str, Any] = loading.read_arguments(arguments.config) if arguments.config and not named else {}
    sizes = transducer.sizes(given, str(arguments.config))
    of_flags = {key: loading.parse_value(value, f"--size {key}") for key, value in arguments.size}
    sizes = replace(sizes, **vars(transducer.sizes({**given, **of_flags}, "--size")))
    if named and arguments.model:
        raise UserError(f"--config {named}: is a model, as --model is; give one of them")
    if arguments.arg and not arguments.model:
        raise UserError("--arg: is an argument of --model; give that too, or --size for the Conformer transducer")
    implementation = find(arguments.loss)
    if implementation.kind == "additive":
        raise UserError(f"--loss {arguments.loss}: has no joiner; give a pruned or an exact loss")
    patterns: Dict[str, Tuple[str, ...]] = {}
    for name, pattern in arguments.label:
        patterns[name] = (*patterns.get(name, ()), pattern)
    given = {key: loading.parse_value(value, f"--arg {key}") for key, value in arguments.arg}
    return Choice(
        sizes,
        implementation,
        model=configuration.python_name(arguments.model, Path()) if arguments.model else "",
        config=named,
        arguments=carried.located(given),
        labels=patterns,
        depth=arguments.depth,
        trace_steps=arguments.trace_steps,
        dropout=arguments.dropout,
        amp=arguments.amp is not None,
        compile=arguments.compile,
        optimizer=arguments.optimizer,
        checkpoint=tuple(arguments.checkpoint),
    )


def _settings(arguments: argparse.Namespace, device: str, sizes: Any, more: Mapping[str, Any]) -> Settings:
    """more: sizes of batches, at least."""
    given = {name: getattr(arguments, name) for name in ("sort_utterance", "num_batches", "seed", "threads")}
    given["prune_range"] = arguments.prune_range
    shape_file = str(arguments.shape_file.absolute())
    own = {"vocab_size": sizes.vocab_size, "encoder_dim": sizes.joiner_dim, "shape_file": shape_file}
    return settings.resolve({**given, **own, "rounds": 1, **more}, device)


def _write(cells: List[Size], folder: Path, arguments: argparse.Namespace) -> None:
    """Print the tables, and write them, the rows, the documents and the page to the folder."""
    shown = tables.render(cells, "table")
    print(tables.render(cells, arguments.format), end="")
    of_cells = [folder / str(place) if place else folder for place in range(len(cells))]
    tables_of_operators = [one / f"{one.name}.txt" for one in of_cells]
    operators = [read_text(path) for path in tables_of_operators if path.exists()]
    title, sections = report.TITLE, report.of_cells(cells, folder.name, folder / records.FILE_NAME)
    files: Dict[str, Any] = {
        "profile-filtered.txt": shown,
        "profile.txt": "\n".join([shown, *operators]),
        "profile.csv": tables.csv(cells),
        records.FILE_NAME: tables.json(cells),
        report.PAGE_NAME: partial(page.assembled, sections, folder, title, f"{folder.name}."),
    }
    for name, content in files.items():
        try:
            text = content if isinstance(content, str) else content()
        except UserError as error:  # no jinja2: the numbers are there
            print(f"warning: {plain(error)}", file=sys.stderr)
        else:
            write_whole(another("--log-dir", "folder"), (folder / name, text))
    if arguments.png:
        for place, (_, found, _) in enumerate(cells):
            if found:
                named = [(f"{one.key}-{place + 1}" if place else one.key, one) for one in figures(found)]
                png.save(named, folder)
    if not arguments.quiet:
        print(f"profile: {folder / report.PAGE_NAME}", file=sys.stderr)

"""The command `rnnt-bench largest`: read flags, search the largest batches, print a table.

Without --model it searches the largest batch of each loss; with it, that of each bucket of a
training.  No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.cli import benchmark
from rnnt_bench.cli import shapes as shape_files
from rnnt_bench.cli.parser import add_choice, add_setting, chosen, read_settings, standard
from rnnt_bench.core import files, flag_types, settings, text
from rnnt_bench.core.arguments import Parser, refuse
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import find
from rnnt_bench.jobs import job, session
from rnnt_bench.records import store
from rnnt_bench.records.schema import as_written
from rnnt_bench.setup import interpreters
from rnnt_bench.show.tables import FORMATS
from rnnt_bench.system import memory
from rnnt_bench.tools import commands, configuration, kept
from rnnt_bench.tools.largest import buckets, losses
from rnnt_bench.tools.largest.losses import TOOL
from rnnt_bench.tools.largest.search import Search, first_limit
from rnnt_bench.tools.sizes import ICEFALL, loss_here, read_sizes

DESCRIPTION = """Find the largest batch of each loss that gets through a step within a limit on memory.

Each size is tried in a process of its own: sizes double until one does not fit, then the gap is halved.
docs/usage.md tells what fits means."""
EXAMPLES = """examples:
  rnnt-bench largest --memory-limit 16GB
  rnnt-bench largest --only fused,torchaudio --memory-limit 4GiB --vocab-size 1024
  rnnt-bench largest --sort-utterance true --memory-limit 80%
  rnnt-bench largest --only k2 --scope loss

Exit code: 0 if every loss that can run here has an answer; 1 if one failed; 2 for bad usage."""
#: Settings that the groups of settings in `parser` leave out.  All steps are of the heaviest
#: batches, and no loss is timed.  --device, --preset and --seed are among the flags of every tool.
WITHOUT = ("passes", "batches", "num_batches", "mode", "device", "preset", "seed")
#: Settings whose flags mean something else here -> their help.
WORDS = {
    "sort_utterance": "Search the largest --max-frames of utterances sorted by length, not the largest --batch-size",
    "batch_size": "The first size to try. Default: by --preset",
    "max_frames": "The first size to try with --sort-utterance true. Default: by --preset",
    "scopes": "What must fit, one of loss and step. Default: step",
}
#: Flags that have no effect with --model: those that choose losses, and most settings.
WITHOUT_MODEL = (
    *("only", "loss", "topology", "skip", "largest_cap", "in_place"),
    *(
        key
        for key in settings.SETTINGS
        if key not in ("shape_file", "seed", "threads", "vocab_size", "device")
    ),
)
#: Suffixes of lhotse's manifests.
MANIFESTS = (".json", ".jsonl", ".gz")
#: Suffixes of files with the sizes of the Conformer transducer, see `has_sizes`.
SIZES = (".yaml", ".yml", ".json")
#: Flags that do not apply to the Conformer transducer.
OF_FACTORY = ("args", "features", "vocab_size")
#: The import path of the Conformer transducer.
TRAINED = "rnnt_bench.tools.transducer:Trained"
#: Formats of lines to paste into a configuration of lhotse or NeMo.
PASTED = ("lhotse", "nemo")
#: Share of a CPU's available memory that is the limit by default. The loaded process itself and
#: other processes need the rest.
SHARE_OF_AVAILABLE = 0.9
#: Environment variables of a process that tries a size. Each further arena of glibc would reserve
#: 64 MB of address space.
VARIABLES = {**settings.MEMORY_VARIABLES, "MALLOC_ARENA_MAX": "1"}


def bucket_counts(text: str) -> tuple[int, int]:
    """Parse "12" or "12x2": the number of buckets by duration, and by tokens within each."""
    durations, _, parts = text.partition("x")
    whole = flag_types.Whole(1)
    return whole(durations), whole(parts or "1")


#: Flags of a training, which only apply with --model -> arguments of add_argument.
TRAINING: dict[str, dict[str, Any]] = {
    "--model": dict(
        metavar="MODULE:NAME",
        help="Model: package.module:name or file.py:name, a class or a factory. It takes features (N, T, F), their "
        "lengths, symbols (N, U+1) with a blank first, and their lengths, and returns its loss, or logits (N, T, U+1, "
        "V); a model of transformers takes its own. Else its module has batch(N, T, U) and step(model, batch) -> loss. "
        "Or the Conformer transducer of `rnnt-bench profile`: the YAML file of its sizes, or icefall.",
    ),
    "--args": dict(
        type=flag_types.path, metavar="FILE", help="YAML or JSON file of --model's arguments."
    ),
    "--arg": dict(
        action="append",
        default=[],
        type=flag_types.key_value("KEY=VALUE"),
        metavar="KEY=VALUE",
        help="An argument of --model, or a size, in place of that of the file. Repeatable.",
    ),
    "--losses": dict(
        type=flag_types.names,
        default=("",),
        metavar="A,B",
        help="Search for each of these losses: the factory's argument `loss`; fused: by fused_transducer.recipes.patch",
    ),
    "--buckets": dict(
        type=bucket_counts,
        default=(12, 1),
        metavar="K[xP]",
        help="Bins of equal total duration, each cut into P by tokens. Default: 12",
    ),
    "--bpe-model": dict(
        type=flag_types.path,
        metavar="FILE",
        help="SentencePiece model that counts the tokens, where --shape-file is a lhotse manifest of cuts or "
        "supervisions.",
    ),
    "--margin": dict(
        type=flag_types.percentage,
        default=0.05,
        metavar="P%",
        help="Share of the limit to leave free in the search. Default: 5%%",
    ),
    "--optimizer": dict(
        default="AdamW", metavar="NAME", help="Class of torch.optim. Default: AdamW"
    ),
    "--amp": dict(choices=("bfloat16",), help="Run the model under autocast. Default: none"),
    "--gradient-checkpointing": dict(
        action="store_true",
        help="Train with the gradient checkpointing that a model of transformers has.",
    ),
    "--features": dict(
        type=flag_types.Whole(1), default=80, metavar="F", help="Features of a frame. Default: 80"
    ),
    "--hop": dict(
        type=flag_types.Whole(1),
        default=160,
        metavar="N",
        help="Samples of a frame, for a model that takes samples. Default: 160",
    ),
}


def parser() -> Parser:
    """Return the parser of `rnnt-bench largest`."""
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_choice(result)
    group = result.add_argument_group("what fits")
    group.add_argument(
        "--memory-limit",
        type=flag_types.memory_size,
        metavar="SIZE",
        help="Memory that a step may take on top of the loaded process, inputs included: 4GiB, 500MB, or 80%% of the "
        "device. It is enforced: on a CPU by a limit on address space; on CUDA by holding back the rest of the device. "
        "Default: nine tenths of what is available now on a CPU, all that is free on CUDA",
    )
    group.add_argument(
        "--largest-cap",
        type=flag_types.Whole(1),
        metavar="K",
        help="Largest size to try: utterances, or frames with --sort-utterance true. Default: all there are",
    )
    for key, words in WORDS.items():
        add_setting(group, key, words)
    group = result.add_argument_group("the batch of a whole training, bucket by bucket")
    for flag, details in TRAINING.items():
        group.add_argument(flag, **details)
    for title in (settings.MEASURED, settings.BATCHES, settings.LENGTHS):
        group = result.add_argument_group(title)
        for key, setting in settings.SETTINGS.items():
            if setting.group == title and key not in (*WITHOUT, *WORDS):
                add_setting(group, key, setting.help_text())
    group = result.add_argument_group("the run")
    add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    group.add_argument(
        "--in-place",
        action="store_true",
        help="Run everything in this Python, with what it has installed.",
    )
    commands.add_flags(
        group,
        folder="largest-<what>",
        quick="a small joiner and vocabulary",
        timeout=1800.0,
        seed="Seed of inputs and weights",
        formats=(*FORMATS, *PASTED),
    )
    return result


def has_sizes(model: str) -> bool:
    """Tell whether --model names the Conformer transducer: "icefall", or a file of its sizes."""
    return model == ICEFALL or Path(model).suffix in SIZES


def is_manifest(shape_file: Path | None) -> bool:
    """Tell whether --shape-file names a manifest of lhotse."""
    return shape_file is not None and shape_file.suffix in MANIFESTS


def check(arguments: argparse.Namespace) -> None:
    """Raise UserError for a flag that has no effect with the other flags, and for more than one
    scope."""
    refuse_given = partial(refuse, parser(), arguments)
    model = arguments.model or ""
    if model:
        refuse_given(WITHOUT_MODEL, "does not go with --model; leave one of them out")
    else:
        of_training = [flag[2:].replace("-", "_") for flag in TRAINING]
        refuse_given(of_training, "only applies with --model; add that, or leave it out")
        if arguments.format in PASTED:
            refuse_given(["format"], f"{arguments.format} only applies with --model; add that")
    if has_sizes(model):
        refuse_given(OF_FACTORY, f"is for a class or a factory; {model} has the sizes")
    if not is_manifest(arguments.shape_file):
        refuse_given(["bpe_model"], "is for a lhotse manifest as --shape-file")
    if arguments.scopes and len(arguments.scopes) > 1:
        refuse_given(["scopes"], "has to be one of loss and step")


class Plan(NamedTuple):
    """A search as it is to be carried out.

    Attributes:
        name: of the run
        config: what is searched, for the header of the run
        next_tasks: returns the jobs that are to come next; [] at the end.  It takes the run so far
            and the memory limit in bytes, which is None on CUDA.
    """

    name: str
    config: losses.Losses | buckets.Buckets
    settings: settings.Settings
    next_tasks: Callable[[kept.Kept, int | None], list[job.Task]]


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Search the largest batch of each loss, or of each bucket of a model; return the exit code."""
    check(arguments)
    plan = plan_for_model(arguments) if arguments.model else plan_for_losses(arguments)
    words, limit_bytes = memory_limit(arguments.memory_limit, plan.settings.device)
    plan.config.limit = words

    def follow(run: kept.Kept) -> list[job.Task]:
        # With --resume a run keeps the limit of its first job.
        return plan.next_tasks(run, first_limit(run) or limit_bytes)

    return commands.measured(
        TOOL,
        plan.name,
        plan.config,
        tasks=[],
        settings=plan.settings,
        arguments=arguments,
        answer=losses.answer,
        executor=executor,
        timed=bool(arguments.model),
        follow=follow,
    )


def plan_for_losses(arguments: argparse.Namespace) -> Plan:
    """Return the plan of a search of the largest batch of each loss.  Raises UserError."""
    names = chosen(arguments)
    choices = interpreters.choose_all(names, arguments.in_place, arguments.loss)
    interpreters.need_torch(choices)
    pythons = {name: choice.python for name, choice in choices.items()}
    device = interpreters.resolve_device(arguments.device, list(pythons.values()))
    if tuple(arguments.only) == standard():  # the user named no losses
        names = benchmark.default_rows(names, device, is_short=False, topology=arguments.topology)
    kinds = {name: find(name).kind for name in names}
    flags = read_settings(arguments)
    settings.check_kinds([key for key, value in flags.items() if value is not None], kinds.values())
    # These values differ from those of the flags: "step" is the default, and one batch is enough.
    fixed = {"scopes": arguments.scopes or ("step",), "batches": "first", "num_batches": 1}
    resolved = settings.resolve({**flags, **fixed}, device)
    searches, unit = _searches(names, resolved, arguments.largest_cap)
    config = losses.Losses(
        losses=searches,
        kinds=kinds,
        missing={name: choices[name].reason for name in names if pythons[name] is None},
        capped=arguments.largest_cap is not None,
        unit=unit,
        words=[
            f"scope {resolved.scopes[0]}, V {resolved.vocab_size}, joiner {resolved.encoder_dim}, {resolved.dtype}",
            *settings.described(resolved.to_json()),
        ],
    )
    size_setting = "max_frames" if resolved.sort_utterance else "batch_size"

    def next_tasks(run: kept.Kept, limit_bytes: int | None) -> list[job.Task]:
        """Return the next task, under `limit_bytes`, of each loss that is not finished."""
        tasks = []
        for state in losses.unfinished(config, run):
            row = find(state.name)
            request = losses.Pass(
                script=row.script,
                variant=row.variant,
                pass_name=state.pass_name,
                memory_limit=arguments.memory_limit,
                limit_bytes=limit_bytes,
            )
            name = f"{state.name} {state.pass_name}"
            if state.pass_name != "correctness":
                name += f"-{state.next_size}"
            changes = ((size_setting, state.next_size),)
            python = pythons[state.name]
            tasks.append(job.Task(name, TOOL, as_written(request), changes, python, VARIABLES))
        return tasks

    return Plan(size_setting.replace("_", "-"), config, resolved, next_tasks)


def _searches(
    names: Sequence[str], resolved: settings.Settings, largest_cap: int | None
) -> tuple[list[Search], str]:
    """Return a search for each loss, and the unit of the sizes of all searches: "utterances".

    Raises UserError where --largest-cap is below the smallest size."""
    from rnnt_bench.data import batching

    totals = batching.load(resolved)[0].totals()
    low, largest, unit = 1, totals.utterances, "utterances"
    start = resolved.batch_size
    if resolved.sort_utterance:
        low, largest, unit = totals.T_max, totals.frames, "frames (sum of T)"
        start = resolved.max_frames
        if resolved.max_frames_padded:
            largest, unit = totals.utterances * totals.T_max, "padded frames (N x longest T)"
    cap = min(largest, largest_cap or largest)
    if cap < low:
        raise UserError(
            f"--largest-cap {cap}: the longest utterance has {low} frames and is a batch of its own; "
            "give at least that"
        )
    return [Search(name, low, cap, start) for name in names], unit


def plan_for_model(arguments: argparse.Namespace) -> Plan:
    """Return the plan of a search of the largest batch of each bucket of a model.

    If `arguments` has no shape file, set it to the suite's own.  Raises UserError."""
    arguments.shape_file = arguments.shape_file or files.ROOT / "data" / "shape_info.features.pt"
    needed = ("lhotse", "sentencepiece") if is_manifest(arguments.shape_file) else ()
    python = interpreters.with_torch(*needed)
    device = interpreters.resolve_device(arguments.device, [python])
    resolved = settings.resolve(read_settings(arguments), device)
    utterances, seconds = _utterances(arguments.shape_file, arguments.bpe_model)
    steps = _steps(arguments, resolved.vocab_size, device)
    details = [arguments.optimizer]
    if arguments.amp:
        details.append(f"amp {arguments.amp}")
    if arguments.gradient_checkpointing:
        details.append("gradient checkpointing")
    details += [f"{key} {value}" for key, value in steps.arguments.items() if value != ""]
    config = buckets.Buckets(
        model=arguments.model,
        losses=list(arguments.losses),
        buckets=buckets.of_utterances(utterances, *arguments.buckets),
        seconds=seconds,
        margin=arguments.margin,
        words=[", ".join(details)],
    )

    def next_tasks(run: kept.Kept, limit_bytes: int | None) -> list[job.Task]:
        """Return a task for each job that `buckets.next_probes` returns.

        limit_bytes: the memory limit, which is put into the request of each task."""
        steps.limit_bytes = limit_bytes  # `next_probes` makes each request as a copy of `steps`
        return [
            job.Task(name, TOOL, as_written(request), environment=VARIABLES)
            for name, request in buckets.next_probes(config, run, steps)
        ]

    return Plan(commands.run_name(arguments.model), config, resolved, next_tasks)


def _utterances(path: Path, bpe_model: Path | None) -> tuple[Any, float]:
    """Return the numbers of feature frames and tokens of each utterance, (utterances, 2), and the
    seconds of a feature frame.

    Raises UserError, also for a manifest without `bpe_model`.

    path: a shape file, or a manifest of lhotse; bpe_model: counts the tokens of a manifest's texts,
    not needed for a shape file."""
    # These import numpy, which --help does not need.
    from rnnt_bench.data import batching, generation, shapes

    if not is_manifest(path):
        utterances = shapes.load(path)  # its frames are the encoder's, after subsampling
        factor = shapes.subsampling(path) or batching.SUBSAMPLING
        utterances[:, 0] = shapes.feature_frames(utterances[:, 0], factor)
        return utterances, shapes.frame_shift(path)
    if bpe_model is None:
        raise UserError(
            f"--shape-file {path}: a manifest has texts; give --bpe-model, which counts their tokens"
        )
    words = ["--manifest", str(path), "--bpe-model", str(bpe_model)]
    flags = shape_files.parser().parse_args(words)
    return generation.from_manifest(flags, outputs=[]).features, flags.frame_shift


def _steps(arguments: argparse.Namespace, vocab_size: int, device: str) -> buckets.Steps:
    """Return what the requests of all jobs on the model of --model have in common.

    Each job gets its loss, tries, rounds and limit in bytes later.  Raises UserError."""
    result = buckets.Steps(
        # A path of --model is relative to the working directory, not to a configuration.
        model=configuration.python_name(arguments.model, Path()),
        arguments={},
        features=arguments.features,
        hop=arguments.hop,
        vocab_size=vocab_size,
        optimizer=arguments.optimizer,
        amp=bool(arguments.amp),
        gradient_checkpointing=arguments.gradient_checkpointing,
        share=1 - arguments.margin,
        memory_limit=arguments.memory_limit,
    )
    if has_sizes(arguments.model):  # the suite's own model: its sizes win over the flags
        sizes = read_sizes(arguments.model, arguments.arg, "--arg")
        for loss in filter(None, arguments.losses):  # "" is the model's own loss
            loss_here(loss, "--losses")  # refuses a loss that does not run in this Python
        config = ICEFALL if arguments.model == ICEFALL else ""
        result.model = TRAINED
        result.arguments = {**as_written(sizes), "config": config, "device": device}
        result.features = sizes.features
        result.vocab_size = sizes.vocab_size
        return result
    if arguments.args:
        result.arguments = configuration.read(arguments.args)
    for key, value in arguments.arg:
        result.arguments[key] = configuration.parsed(value, f"--arg {key}")
    return result


def memory_limit(asked: str | None, device: str) -> tuple[str, int | None]:
    """Return the memory limit in words, and in bytes; None for the bytes on CUDA.

    On a CPU the limit is `asked`.  Without it, or if it exceeds the available memory, the limit is
    SHARE_OF_AVAILABLE of the available memory; if it exceeds, warn.  Raises UserError on a CPU
    without /proc.

    asked: text of --memory-limit; None if it was not given"""
    words = f"--memory-limit {asked}" if asked else "what is available"
    if device != "cpu":
        return words, None
    total, available = memory.total_memory(), memory.available_memory()
    if total is None or available is None:
        raise UserError("on a CPU it needs Linux's /proc, which tells how much memory there is")
    safe = int(SHARE_OF_AVAILABLE * available)
    size = flag_types.bytes_of(asked, total) if asked else safe
    if size <= available:
        return words, size
    used = f"the limit is {safe / text.GIB:.3g} GiB, {SHARE_OF_AVAILABLE:.0%} of what is available here"
    store.warn(f"{words}: {used}; larger batches may fit where all of it is free")
    return f"{words}; {used}", safe

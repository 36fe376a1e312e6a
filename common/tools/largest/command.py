"""The command `rnnt-bench largest`: from flags to a search and its table.  No torch here."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

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
from rnnt_bench.tools.largest.search import Search, limit_of
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
#: Settings that have no meaning here: all steps are of the heaviest batches, and nothing is timed.
WITHOUT = (
    "passes",
    "scopes",
    "sort_utterance",
    "batch_size",
    "max_frames",
    "batches",
    "num_batches",
    "mode",
)
#: Settings that have a meaning for a model.
OF_MODEL = ("shape_file", "seed", "threads", "vocab_size", "file_vocab_size")
#: The group of flags that need --model.
TRAINING = "the batch of a whole training, bucket by bucket"
#: Flags that have no effect with it.
WITHOUT_MODEL = ("only", "loss", "topology", "skip", "largest_cap", "in_place") + tuple(
    key for key in settings.SETTINGS if key not in (*OF_MODEL, "device")
)
#: Ends of the names of lhotse's manifests.
MANIFESTS = (".json", ".jsonl", ".gz")
#: The model of a YAML file.
TRAINED = "rnnt_bench.tools.transducer:Trained"
#: Utterances of the batch on which correctness is judged, before the size is known.
JUDGED = 2
#: Share of a CPU's available memory that is the limit by default. The loaded process and others
#: need the rest.
SHARE_OF_AVAILABLE = 0.9
#: Of a process that tries a size: each further arena of glibc would reserve 64 MB of address space.
VARIABLES = {**settings.MEMORY_VARIABLES, "MALLOC_ARENA_MAX": "1"}


def parser() -> Parser:
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
    _add_model(result.add_argument_group(TRAINING))
    group.add_argument(
        "--largest-cap",
        type=flag_types.whole(1),
        metavar="K",
        help="Try no more than so many. Default: all",
    )
    words = "Search the largest --max-frames of utterances sorted by length, not the largest --batch-size"
    add_setting(group, "sort_utterance", words)
    add_setting(group, "batch_size", "The first size to try. Default: by --preset")
    add_setting(
        group,
        "max_frames",
        "The first size to try with --sort-utterance true. Default: by --preset",
    )
    add_setting(group, "scopes", "What must fit, one of loss and step. Default: step")
    for title in (settings.MEASURED, settings.BATCHES, settings.LENGTHS):
        group = result.add_argument_group(title)
        for key, setting in settings.SETTINGS.items():
            if setting.group == title and key not in (*WITHOUT, "device", "preset", "seed"):
                add_setting(group, key, setting.help_text())
    group = result.add_argument_group("the run")
    add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    group.add_argument(
        "--in-place", action="store_true", help="Run everything in this Python, with what it has."
    )
    commands.add_flags(
        group,
        folder="largest-<what>",
        quick="a small joiner and vocabulary",
        timeout=1800.0,
        seed="Seed of inputs and weights",
        formats=(*FORMATS, "lhotse", "nemo"),
    )
    return result


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Search the largest batch of each loss, or of each bucket of a model; return the exit code."""
    if arguments.model:
        return _of_model(arguments, executor)
    if arguments.format in ("lhotse", "nemo"):
        raise UserError(f"--format {arguments.format}: is for --model; give that too")
    flags = parser()
    of_model = next(group for group in flags._action_groups if group.title == TRAINING)
    keys = [action.dest for action in of_model._group_actions]
    refuse(flags, arguments, keys, "only applies with --model; add that, or leave it out")
    if len(arguments.scopes or ("step",)) != 1:
        raise UserError("--scope: one of loss and step has to fit, not both")
    names = chosen(arguments)
    choices = interpreters.choose_all(names, arguments.in_place, arguments.loss)
    interpreters.need_torch(choices)
    device = interpreters.resolve_device(
        arguments.device, [choice.python for choice in choices.values()]
    )
    if tuple(arguments.only) == standard():
        names = benchmark.default_rows(names, device, False, arguments.topology)
    given = read_settings(arguments)
    kinds = {find(name).kind for name in names}
    settings.check_kinds([key for key, value in given.items() if value is not None], kinds)
    resolved = settings.resolve(
        {**given, "scopes": arguments.scopes or ("step",), "batches": "first", "num_batches": 1},
        device,
    )
    limit, size = memory_limit(arguments.memory_limit, device)
    config = losses.Losses(
        losses=[Search(name, *_sizes(resolved, arguments.largest_cap)) for name in names],
        kinds={name: find(name).kind for name in names},
        missing={name: choices[name].reason for name in names if choices[name].python is None},
        capped=arguments.largest_cap is not None,
        unit=_unit(resolved),
        limit=limit,
        words=[
            f"scope {resolved.scopes[0]}, V {resolved.vocab_size}, joiner {resolved.encoder_dim}, {resolved.dtype}",
            *settings.described(resolved.to_json()),
        ],
    )
    sized = "max_frames" if resolved.sort_utterance else "batch_size"

    def task(name: str, pass_name: str, tried: int, limit_bytes: int | None = size) -> job.Task:
        row = find(name)
        given = {
            "implementation": name,
            "script": row.script,
            "variant": row.variant,
            "pass": pass_name,
            "limit_bytes": limit_bytes,
            "memory_limit": arguments.memory_limit,
        }
        called = f"{name} {pass_name}" + ("" if pass_name == "correctness" else f"-{tried}")
        return job.Task(called, TOOL, given, ((sized, tried),), choices[name].python, VARIABLES)

    few = config.losses[0].low if resolved.sort_utterance else JUDGED
    tasks = [task(name, "correctness", few) for name in names if name not in config.missing]

    def follow(run: kept.Kept) -> list[job.Task]:
        limit_bytes = limit_of(run) or size  # of a run that goes on, that of its first step
        return [task(*coming, limit_bytes) for coming in losses.coming(config, run)]

    return commands.measured(
        TOOL,
        sized.replace("_", "-"),
        config,
        tasks,
        resolved,
        arguments,
        losses.answer,
        executor,
        False,
        follow,
    )


def _add_model(group: Any) -> None:
    form = "KEY=VALUE"
    whole = flag_types.whole(1)
    group.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="Model: package.module:name or file.py:name, a class or a factory. It takes features (N, T, F), their "
        "lengths, symbols (N, U+1) with a blank first, and their lengths, and returns its loss, or logits (N, T, U+1, "
        "V); a model of transformers takes its own. Else its module has batch(N, T, U) and step(model, batch) -> loss. "
        "Or the Conformer transducer of `rnnt-bench profile`: the YAML file of its sizes, or icefall.",
    )
    group.add_argument(
        "--args",
        type=flag_types.path,
        metavar="FILE",
        help="YAML or JSON file of --model's arguments.",
    )
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        type=flag_types.pair(form),
        metavar=form,
        help="An argument of --model, or a size, in place of that of the file. Repeatable.",
    )
    group.add_argument(
        "--losses",
        type=flag_types.words,
        default=("",),
        metavar="A,B",
        help="Search for each of these losses: the factory's argument `loss`; fused: by fused_transducer.recipes.patch",
    )
    group.add_argument(
        "--buckets",
        type=_buckets,
        default=(12, 1),
        metavar="K[xP]",
        help="Bins of equal total duration, each cut into P by tokens. Default: 12",
    )
    group.add_argument(
        "--bpe-model",
        type=flag_types.path,
        metavar="FILE",
        help="SentencePiece model that counts the tokens, where --shape-file is a lhotse manifest of cuts or "
        "supervisions.",
    )
    group.add_argument(
        "--margin",
        type=flag_types.percentage,
        default=0.05,
        metavar="P%",
        help="Share of the limit to leave free in the search. Default: 5%%",
    )
    group.add_argument(
        "--optimizer", default="AdamW", metavar="NAME", help="Class of torch.optim. Default: AdamW"
    )
    group.add_argument(
        "--amp", choices=("bfloat16",), help="Run the model under autocast. Default: none"
    )
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="Train with the gradient checkpointing that a model of transformers has.",
    )
    group.add_argument(
        "--features", type=whole, default=80, metavar="F", help="Features of a frame. Default: 80"
    )
    group.add_argument(
        "--hop",
        type=whole,
        default=160,
        metavar="N",
        help="Samples of a frame, for a model that takes samples. Default: 160",
    )


def _buckets(text: str) -> tuple[int, int]:
    durations, _, parts = text.partition("x")
    whole = flag_types.whole(1)
    return whole(durations), whole(parts or "1")


def _of_model(arguments: argparse.Namespace, executor: session.Executor | None) -> int:
    """Search the largest batch of each bucket of a model; return the exit code."""
    refuse(parser(), arguments, WITHOUT_MODEL, "does not go with --model; leave one of them out")
    arguments.shape_file = arguments.shape_file or files.ROOT / "data" / "shape_info.features.pt"
    is_manifest = arguments.shape_file.suffix in MANIFESTS
    if not is_manifest:
        words = "is for a manifest as --shape-file; a shape file has the tokens"
        refuse(parser(), arguments, ("bpe_model",), words)
    interpreters.with_torch(*(("lhotse", "sentencepiece") if is_manifest else ()))
    device = interpreters.resolve_device(arguments.device, [Path(sys.executable)])
    given = read_settings(arguments)
    resolved = settings.resolve({key: given.get(key) for key in OF_MODEL}, device)
    utterances, seconds = _utterances(arguments.shape_file, is_manifest, arguments.bpe_model)
    limit, size = memory_limit(arguments.memory_limit, device)
    model = _named(arguments, resolved.vocab_size, device)
    used = [f"amp {arguments.amp}"] if arguments.amp else []
    used += ["gradient checkpointing"] if arguments.gradient_checkpointing else []
    of_model = (f"{key} {value}" for key, value in model["arguments"].items() if value != "")
    config = buckets.Training(
        model=arguments.model,
        losses=list(arguments.losses),
        buckets=buckets.of_utterances(utterances, *arguments.buckets),
        seconds=seconds,
        limit=limit,
        margin=arguments.margin,
        words=[", ".join([arguments.optimizer, *used, *of_model])],
    )

    def task(loss: str, called: str, sizes: dict[int, int], limit_bytes: int | None) -> job.Task:
        alone = "probe" in called
        chosen = [
            (number, N, config.buckets[number - 1].T, config.buckets[number - 1].U)
            for number, N in sizes.items()
        ]
        given = {
            **model,
            "loss": loss,
            "optimizer": arguments.optimizer,
            "amp": bool(arguments.amp),
            "gradient_checkpointing": arguments.gradient_checkpointing,
            "hop": arguments.hop,
            "buckets": chosen,
            "steps": buckets.PROBE_STEPS
            if alone
            else max(buckets.TOGETHER, buckets.OF_BUCKET * len(sizes)),
            "limit_bytes": limit_bytes,
            "memory_limit": arguments.memory_limit,
            "share": 1 - arguments.margin if alone else 1.0,
        }
        return job.Task(called, TOOL, given, environment=VARIABLES)

    def follow(run: kept.Kept) -> list[job.Task]:
        limit_bytes = limit_of(run) or size  # of a run that goes on, that of its first step
        return [task(*coming, limit_bytes) for coming in buckets.coming(config, run)]

    called = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(arguments.model).name)
    return commands.measured(
        TOOL, called, config, [], resolved, arguments, losses.answer, executor, follow=follow
    )


def _utterances(path: Path, is_manifest: bool, bpe_model: Path | None) -> tuple[Any, float]:
    """Return feature frames and tokens of each utterance, (utterances, 2), and the seconds of a
    frame."""
    from rnnt_bench.data import (  # bring numpy, which --help does without
        batching,
        generation,
        shapes,
    )

    if not is_manifest:
        utterances = shapes.load(path)
        utterances[:, 0] = shapes.feature_frames(
            utterances[:, 0], shapes.subsampling(path) or batching.SUBSAMPLING
        )
        return utterances, shapes.frame_shift(path)
    if bpe_model is None:
        raise UserError(
            f"--shape-file {path}: a manifest has texts; give --bpe-model, which counts their tokens"
        )
    flags = shape_files.parser().parse_args(
        ["--manifest", str(path), "--bpe-model", str(bpe_model)]
    )
    return generation.from_manifest(flags, [])[1], flags.frame_shift


def _named(arguments: argparse.Namespace, vocab_size: int, device: str) -> dict[str, Any]:
    """Return the model that --model names, with its arguments and the sizes of a batch, as a job
    takes them."""
    if arguments.model == ICEFALL or Path(arguments.model).suffix in (".yaml", ".yml", ".json"):
        words = f"is for a class or a factory; {arguments.model} has the sizes"
        refuse(parser(), arguments, ("args", "features", "vocab_size"), words)
        sizes = read_sizes(arguments.model, arguments.arg, "--arg")
        for loss in filter(None, arguments.losses):
            loss_here(loss, "--losses")
        config = ICEFALL if arguments.model == ICEFALL else ""
        values = {**as_written(sizes), "config": config, "device": device}
        return {
            "model": TRAINED,
            "arguments": values,
            "features": sizes.features,
            "vocab_size": sizes.vocab_size,
        }
    values = configuration.read(arguments.args) if arguments.args else {}
    values.update(
        (key, configuration.parsed(value, f"--arg {key}")) for key, value in arguments.arg
    )
    name = configuration.python_name(arguments.model, Path())
    return {
        "model": name,
        "arguments": values,
        "features": arguments.features,
        "vocab_size": vocab_size,
    }


def _sizes(resolved: settings.Settings, largest_cap: int | None) -> tuple[int, int, int]:
    """Return the smallest size, the largest, and the first to try.  Raises UserError for a cap
    below the smallest."""
    from rnnt_bench.data import batching

    totals = batching.load(resolved)[0].totals()
    low, most, start = 1, totals.utterances, resolved.batch_size
    if resolved.sort_utterance:  # sorted batches hold at least the longest utterance
        low, most, start = totals.T_max, totals.frames, resolved.max_frames
        if resolved.max_frames_padded:
            most = totals.utterances * totals.T_max
    cap = min(most, largest_cap or most)
    if cap < low:
        longest = f"the longest utterance has {low} frames and is a batch of its own"
        raise UserError(f"--largest-cap {cap}: {longest}; give at least that")
    return low, cap, start


def _unit(resolved: settings.Settings) -> str:
    """Return what sizes count."""
    if not resolved.sort_utterance:
        return "utterances"
    return "padded frames (N x longest T)" if resolved.max_frames_padded else "frames (sum of T)"


def memory_limit(asked: str | None, device: str) -> tuple[str, int | None]:
    """Return the limit in words, and on a CPU in bytes: no more than is safe to use, with a warning
    if that is less than was asked for.  Raises UserError without /proc."""
    words = f"--memory-limit {asked}" if asked else "what is available"
    if device != "cpu":
        return words, None
    total, available = memory.total_memory(), memory.available_memory()
    if total is None or available is None:
        raise UserError("on a CPU it needs Linux's /proc, which tells how much memory there is")
    most = int(SHARE_OF_AVAILABLE * available)
    if asked is None:
        return words, most
    size = flag_types.bytes_of(asked, total)
    if size <= available:
        return words, size
    used = f"the limit is {most / text.GIB:.3g} GiB, {SHARE_OF_AVAILABLE:.0%} of what is available here"
    store.warn(f"{words}: {used}; larger batches may fit where all of it is free")
    return f"{words}; {used}", most

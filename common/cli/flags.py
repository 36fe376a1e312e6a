"""The flags of every benchmark script, group by group: units, defaults and what they mean, as ``--help`` shows them."""

from __future__ import annotations

import argparse
from typing import Any, Dict

from common.cli.flag_types import (
    axis_of,
    device,
    memory_size,
    path,
    percentage,
    positive,
    preset,
    schedule,
    some_of,
    str2bool,
    sweepable,
    threads,
    whole,
)
from common.core import paths, workloads
from common.core.settings import (
    DEFAULTS,
    DTYPES,
    FIND_LARGEST,
    GZIP_TRACES,
    LARGEST_NUM_BATCHES,
    LARGEST_ROUNDS,
    LOGITS,
    PASSES,
    PRESET_NOTES,
    PRESETS,
    SCOPES,
)

BOOL: Dict[str, Any] = {"type": str2bool, "metavar": "BOOL"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags every benchmark script takes.  What is not given stays None and is resolved with the preset."""
    for group in (_what, _batches, _lengths, _what_fits, _timing, _trace, _run):
        group(parser)


def _by_preset(key: str) -> str:
    return ", ".join(f"{values[key]} ({name})" for name, values in PRESETS.items() if key in values)


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    sizes, kinds = ("; ".join(map(": ".join, notes.items())) for notes in (PRESET_NOTES, workloads.NOTES))
    add(
        "--preset",
        type=preset,
        metavar="SIZE,WORKLOAD",
        help=f"a size, a workload, or both: cpu,chars. Sizes: {sizes}. Workloads: {kinds} ({workloads.ESTIMATE}). "
        "Default: seed on CUDA, cpu on a CPU, and bpe500. The flags below override parts of it",
    )
    add(
        "--passes",
        type=some_of(PASSES),
        metavar="A,B",
        help="correctness, timing, memory, trace, or all; each runs in processes of its own. Correctness always comes "
        "first, and a loss that fails it is not measured. Default: all",
    )
    add(
        "--scope",
        dest="scopes",
        type=some_of(SCOPES),
        metavar="A,B",
        help="loss (logits in, gradient of the logits out), step (encoder and decoder outputs through the joiner and "
        "the loss to their gradients and the joiner's), or both: loss,step. Default: both",
    )
    add(
        "--device",
        type=device,
        default="auto",
        help="auto, cpu, cuda or cuda:N. Default: auto (CUDA where there is one)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help=f"of encoder and decoder outputs, joiner and logits. Default: {DEFAULTS['dtype']}",
    )
    add(
        "--vocab-size",
        type=whole(2),
        metavar="V",
        help=f"symbols, blank included. Default: {DEFAULTS['vocab_size']} (50 with --preset quick, 4096 with "
        "bpe4096-x8, 30 with chars)",
    )
    add(
        "--encoder-dim",
        type=whole(1),
        metavar="D",
        help="dimension of encoder and decoder outputs and of the joiner's input. Default: "
        f"{DEFAULTS['encoder_dim']} (32 with --preset quick)",
    )
    add(
        "--logits",
        choices=LOGITS,
        help="random: uniform inputs and weights, as in the 2022 suite, so the posteriors are diffuse; peaky: inputs "
        "and weights that give one random alignment almost all of the probability, as a trained model does. Default: "
        f"{DEFAULTS['logits']}",
    )
    add(
        "--margin",
        type=positive,
        metavar="NATS",
        help="with --logits peaky: by how much the target's logit is above the blank's where the alignment emits it, "
        f"and the blank's above the next target's where it does not. Default: {DEFAULTS['margin']:g}",
    )
    add(
        "--pruned-recipe",
        choices=("icefall", "benchmark-2022"),
        help="the step of the pruned losses. icefall: projections to V, 0.5 x simple + pruned loss, backward through "
        "both; benchmark-2022: no projections, backward through the pruned loss alone. Default: icefall",
    )
    add(
        "--prune-range",
        type=whole(2),
        metavar="S",
        help=f"symbols that the pruned losses keep for each frame. Default: {DEFAULTS['prune_range']}",
    )


def _batches(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batches").add_argument
    add(
        "--shape-file",
        type=path,
        metavar="FILE",
        help="(T, U) of every utterance, as generate_shape_info.py writes it. Default: the suite's shape_info.pt",
    )
    add(
        "--sort-utterance",
        **BOOL,
        nargs="?",
        const=True,
        help="true: sort utterances by length and fill batches up to --max-frames; false: --batch-size utterances in "
        "file order. Default: false",
    )
    add(
        "--batch-size",
        type=whole(1),
        metavar="N",
        help=f"utterances in a batch, unsorted. Default: {_by_preset('batch_size')}",
    )
    add(
        "--max-frames",
        type=whole(1),
        metavar="FRAMES",
        help=f"the largest sum of T in a batch, sorted. Default: {_by_preset('max_frames')}",
    )
    add(
        "--batches",
        choices=("first", "longest", "random", "spread"),
        help="which batches are measured: the first in order or the longest, the same in every round; a seeded random "
        "choice, or a seeded spread over the whole range of lengths, others in every round. Default: random; spread "
        "with --sort-utterance true",
    )
    add(
        "--num-batches",
        type=whole(1),
        metavar="K",
        help=f"how many batches each round measures. Default: {_by_preset('num_batches')}; with --find-largest, whose "
        f"throughput is over the utterances of so many of the largest batches: {LARGEST_NUM_BATCHES}",
    )
    add(
        "--seed",
        type=whole(0),
        help=f"of inputs, weights, choice of batches and order of processes. Default: {DEFAULTS['seed']}",
    )


def _lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("other lengths, from the same utterances (in this order)").add_argument
    add(
        "--concatenate",
        type=whole(1),
        metavar="K",
        help="K utterances in a row become one, their T and U added up: long form; --batch-size counts the long ones. "
        f"Default: {DEFAULTS['concatenate']} (4 with --preset long-form)",
    )
    add(
        "--subsampling",
        type=int,
        choices=(4, 6, 8),
        help="of the front end: the frames that the same audio has after x6 or x8, at least 1; 4 is the shape file as "
        f"it is. Default: {DEFAULTS['subsampling']} (8 with --preset bpe4096-x8)",
    )
    add(
        "--token-scale",
        type=positive,
        metavar="F",
        help="U is multiplied by F and rounded, for a vocabulary of longer or shorter tokens than BPE 500 "
        f"({workloads.ESTIMATE}). Default: {DEFAULTS['token_scale']:g} (0.66 with --preset bpe4096-x8, 2.66 "
        "with chars)",
    )
    add(
        "--frames",
        type=whole(1),
        metavar="T",
        help="every utterance has T frames, whatever the shape file and --subsampling say. Default: their own",
    )
    add(
        "--tokens",
        type=whole(0),
        metavar="U",
        help="every utterance has U target tokens, whatever the shape file and --token-scale say. Default: their own",
    )


def _what_fits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what fits").add_argument
    add(
        "--find-largest",
        choices=tuple(FIND_LARGEST),
        help="instead of the passes: find the largest --batch-size, or --max-frames, whose heaviest batch gets through "
        "a step, by doubling and bisection, each try in a process of its own; then the throughput at that size, over "
        "the same utterances for all",
    )
    add(
        "--memory-limit",
        type=memory_size,
        metavar="SIZE",
        help="what a step may take on top of the loaded process, inputs included: 4GiB, 500MB, or 80%% of the device. "
        "Enforced: a limit on address space on a CPU; on CUDA the rest of the device is held back. Default: nine "
        "tenths of what is available now on a CPU, all that is free on CUDA",
    )
    add(
        "--largest-cap",
        type=whole(1),
        metavar="K",
        help="try nothing above this many utterances or frames. Default: all of the shape file",
    )


def _timing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("timing (profiler off)").add_argument
    add(
        "--rounds",
        type=whole(1),
        help="fresh processes for each implementation, in shuffled order. Default: "
        f"{DEFAULTS['rounds']} (6 with --preset seed, 1 with quick, {LARGEST_ROUNDS} with --find-largest)",
    )
    add(
        "--spread",
        type=percentage,
        metavar="P%",
        help="stop sampling a scope once the 95%% interval of its median is narrower than +-P%%, with every batch "
        "measured. Default: 2%%",
    )
    add(
        "--max-seconds",
        type=positive,
        metavar="S",
        help="at most so many seconds of samples of one scope in one round; a sweep over the batches is always "
        f"finished. Default: {_by_preset('max_seconds')}",
    )
    add(
        "--max-samples",
        type=whole(1),
        metavar="K",
        help="at most so many samples of one scope in one round, likewise. Default: "
        f"{DEFAULTS['max_samples']} (40 with --preset cpu)",
    )
    add(
        "--threads",
        type=threads,
        metavar="K",
        help="CPU threads of torch, at most 4 for each CPU. Default: the CPUs this process may use",
    )
    add(
        "--denormals",
        choices=("flush", "keep"),
        help="flush: subnormal numbers count as zero on the CPU, as training on a GPU does; keep: they are computed, "
        "slowly. Default: flush",
    )
    add(
        "--allocator",
        choices=("reuse", "system"),
        help="reuse: glibc keeps freed memory on a CPU for the next step, as caching allocators do on a GPU and in "
        "tuned training; system: tensors above 32 MiB are mapped anew in every step. Default: reuse",
    )
    add(
        "--limits",
        **BOOL,
        default=True,
        help="measure the device's copy bandwidth and matrix rate before the first round, which '%% of limit' needs; a "
        "few seconds for the whole run. Default: true",
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("trace (torch.profiler, for TensorBoard)").add_argument
    add(
        "--schedule",
        type=schedule,
        metavar="wait=A,warmup=B,active=C,repeat=D",
        help="steps of the profiler's schedule. Default: wait=10,warmup=10,active=20,repeat=2 (seed), shorter for cpu "
        "and quick",
    )
    add("--record-shapes", **BOOL, help="record operator input shapes. Default: true")
    add("--with-stack", **BOOL, help="record Python stacks. Default: true")
    add("--profile-memory", **BOOL, help="record allocations. Default: true")
    add(
        "--gzip-traces",
        choices=GZIP_TRACES,
        help="compress the traces; auto: those of more than 50 MB. Default: auto",
    )
    add(
        "--memory-snapshot",
        **BOOL,
        help="CUDA: one more step, not profiled, whose allocations go into memory_snapshot.pickle beside the traces "
        "(pytorch.org/memory_viz shows it). Default: false",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    add(
        "--log-dir",
        type=path,
        default=paths.ROOT / "log",
        metavar="DIR",
        help="where each run makes its own folder, <name>-<batch size> (then .2, .3 ...: runs never mix). Default: "
        "log/ beside this script",
    )
    add(
        "--timeout",
        type=positive,
        default=1800.0,
        metavar="S",
        help="seconds after which one process of one implementation is ended and its row says timeout. Default: 1800",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the newest unfinished run, or sweep, with the same settings instead of starting one",
    )
    add(
        "--in-place",
        action="store_true",
        help="run everything in this Python, with what it has installed; use no environment of `make setup`",
    )
    add("--quiet", action="store_true", help="no progress on stderr; the table still goes to stdout")
    add(
        "--sweep",
        type=axis_of(parser),
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="measure at each of these values instead of one; given several times, at all combinations. One folder, "
        f"sweep-KEY, for all; no traces. KEY is one of {', '.join(sweepable(parser))}. Default: no sweep",
    )

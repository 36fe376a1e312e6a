"""The flags of every benchmark script, group by group: units, defaults and what they mean, as ``--help`` shows them.

No torch here.
"""

from __future__ import annotations

import argparse

from common import flag_types, grid, settings, workloads


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags every benchmark script takes.  What is not given stays None and is resolved with the preset."""
    for group in (_what, _batches, _lengths, _what_fits, _timing, _trace, _run):
        group(parser)


def _defaults(key: str) -> str:
    return ", ".join(f"{preset[key]} ({name})" for name, preset in settings.PRESETS.items() if key in preset)


def _what(parser: argparse.ArgumentParser) -> None:
    defaults = settings.DEFAULTS
    group = parser.add_argument_group("what is measured")
    sizes, kinds = (
        "; ".join(f"{name}: {note}" for name, note in notes.items())
        for notes in (settings.PRESET_NOTES, workloads.NOTES)
    )
    group.add_argument(
        "--preset",
        type=flag_types.preset,
        metavar="SIZE,WORKLOAD",
        help=(
            f"a size, a workload, or both: cpu,chars. Sizes: {sizes}. Workloads: {kinds} ({workloads.ESTIMATE}). "
            "Default: seed on CUDA, cpu on a CPU, and bpe500; every flag below overrides its part"
        ),
    )
    group.add_argument(
        "--passes",
        type=flag_types.some_of(settings.PASSES),
        metavar="A,B",
        help=(
            "correctness, timing, memory, trace, or all; each runs in processes of its own. Correctness comes first "
            "also where it is not named, and a loss that fails it is not measured. Default: all"
        ),
    )
    group.add_argument(
        "--scope",
        dest="scopes",
        type=flag_types.some_of(settings.SCOPES),
        metavar="A,B",
        help=(
            "loss (logits in, gradient of the logits out), step (encoder and decoder outputs through the joiner "
            "and the loss to their gradients and the joiner's), or both: loss,step. Default: both"
        ),
    )
    group.add_argument(
        "--device",
        type=flag_types.device,
        default="auto",
        help="auto, cpu, cuda or cuda:N. Default: auto (CUDA where there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=settings.DTYPES,
        help=f"of encoder and decoder outputs, joiner and logits. Default: {defaults['dtype']}",
    )
    group.add_argument(
        "--vocab-size",
        type=flag_types.whole(2),
        metavar="V",
        help=(
            f"symbols, blank included. Default: {defaults['vocab_size']} (50 with --preset quick, 4096 with "
            "bpe4096-x8, 30 with chars)"
        ),
    )
    group.add_argument(
        "--encoder-dim",
        type=flag_types.whole(1),
        metavar="D",
        help=(
            f"dimension of encoder and decoder outputs and the joiner's input. Default: {defaults['encoder_dim']} "
            "(32 with --preset quick)"
        ),
    )
    group.add_argument(
        "--logits",
        choices=settings.LOGITS,
        help=(
            "random: uniform inputs and weights, as in the 2022 suite, so diffuse posteriors; peaky: inputs and "
            "weights under which one alignment, drawn at random, has almost all of the probability, as under a trained "
            f"model. Default: {defaults['logits']}"
        ),
    )
    group.add_argument(
        "--margin",
        type=flag_types.positive,
        metavar="NATS",
        help=(
            "of --logits peaky: by how much the target's logit is above the blank's where the alignment emits it, and "
            f"the blank's above the next target's where it does not. Default: {defaults['margin']:g}"
        ),
    )
    group.add_argument(
        "--pruned-recipe",
        choices=("icefall", "benchmark-2022"),
        help=(
            "the step of the pruned losses. icefall: projections to V, 0.5 x simple + pruned loss, backward "
            "through both; benchmark-2022: no projections, backward through the pruned loss alone. Default: "
            "icefall"
        ),
    )
    group.add_argument(
        "--prune-range",
        type=flag_types.whole(2),
        metavar="S",
        help=f"symbols kept per frame by the pruned losses. Default: {defaults['prune_range']}",
    )


def _batches(parser: argparse.ArgumentParser) -> None:
    defaults = settings.DEFAULTS
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--shape-file",
        type=flag_types.path,
        metavar="FILE",
        help="(T, U) of every utterance, as generate_shape_info.py writes it. Default: the suite's shape_info.pt",
    )
    group.add_argument(
        "--sort-utterance",
        type=flag_types.str2bool,
        metavar="BOOL",
        nargs="?",
        const=True,
        help=(
            "true: sort utterances by length and fill batches up to --max-frames; false: --batch-size utterances "
            "in file order. Default: false"
        ),
    )
    group.add_argument(
        "--batch-size",
        type=flag_types.whole(1),
        metavar="N",
        help=f"utterances in a batch, unsorted. Default: {_defaults('batch_size')}",
    )
    group.add_argument(
        "--max-frames",
        type=flag_types.whole(1),
        metavar="FRAMES",
        help=f"limit of the sum of T in a batch, sorted. Default: {_defaults('max_frames')}",
    )
    group.add_argument(
        "--batches",
        choices=("first", "longest", "random", "spread"),
        help=(
            "which batches are measured: the first in order, the longest, a seeded random choice, or a seeded "
            "spread over the whole range of lengths. Default: first; spread with --sort-utterance true"
        ),
    )
    group.add_argument(
        "--num-batches",
        type=flag_types.whole(1),
        metavar="K",
        help=(
            f"how many batches are measured. Default: {_defaults('num_batches')}; with --find-largest, whose "
            f"throughput is over the utterances of so many of the largest: {settings.LARGEST_NUM_BATCHES}"
        ),
    )
    group.add_argument(
        "--seed",
        type=flag_types.whole(0),
        help=f"of inputs, weights, choice of batches and order of processes. Default: {defaults['seed']}",
    )


def _lengths(parser: argparse.ArgumentParser) -> None:
    defaults = settings.DEFAULTS
    group = parser.add_argument_group("other lengths, from the same utterances (in this order)")
    group.add_argument(
        "--concatenate",
        type=flag_types.whole(1),
        metavar="K",
        help=(
            "K utterances in a row become one, their T and U added up: long form; --batch-size counts the long ones. "
            f"Default: {defaults['concatenate']} (4 with --preset long-form)"
        ),
    )
    group.add_argument(
        "--subsampling",
        type=int,
        choices=(4, 6, 8),
        help=(
            "of the front end: the frames that the same audio has after x6 or x8, at least 1; 4 is the shape file as "
            f"it is. Default: {defaults['subsampling']} (8 with --preset bpe4096-x8)"
        ),
    )
    group.add_argument(
        "--token-scale",
        type=flag_types.positive,
        metavar="F",
        help=(
            "U is multiplied by F and rounded, for a vocabulary of longer or shorter tokens than BPE 500 "
            f"({workloads.ESTIMATE}). Default: {defaults['token_scale']:g} (0.66 with --preset bpe4096-x8, 2.66 with "
            "chars)"
        ),
    )
    group.add_argument(
        "--frames",
        type=flag_types.whole(1),
        metavar="T",
        help="every utterance has just T frames, whatever the shape file and --subsampling say. Default: their own",
    )
    group.add_argument(
        "--tokens",
        type=flag_types.whole(0),
        metavar="U",
        help="every utterance has just U target tokens, likewise. Default: their own",
    )


def _what_fits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what fits")
    group.add_argument(
        "--find-largest",
        choices=tuple(settings.FIND_LARGEST),
        help=(
            "instead of the passes: the largest --batch-size, or --max-frames, whose heaviest batch gets through a "
            "step, by doubling and bisection, each try in a process of its own; then the throughput at that size, over "
            "the same utterances for all"
        ),
    )
    group.add_argument(
        "--memory-limit",
        type=flag_types.memory_size,
        metavar="SIZE",
        help=(
            "what a step may take on top of the loaded process, inputs included: 4GiB, 500MB, or 80%% of the device. "
            "Enforced: address space on a CPU, the rest of the device held back on CUDA. Default: nine tenths of what "
            "is available now on a CPU, all that is free on CUDA"
        ),
    )
    group.add_argument(
        "--largest-cap",
        type=flag_types.whole(1),
        metavar="K",
        help="try nothing above this many utterances or frames. Default: all of the shape file",
    )


def _timing(parser: argparse.ArgumentParser) -> None:
    defaults = settings.DEFAULTS
    group = parser.add_argument_group("timing (profiler off)")
    group.add_argument(
        "--rounds",
        type=flag_types.whole(1),
        help=(
            f"fresh processes per implementation, in shuffled order. Default: {defaults['rounds']} (1 with "
            "--preset quick)"
        ),
    )
    group.add_argument(
        "--spread",
        type=flag_types.percentage,
        metavar="P%",
        help=(
            "stop sampling a scope once the 95%% interval of its median is narrower than +-P%%, with every batch "
            "measured. Default: 2%%"
        ),
    )
    group.add_argument(
        "--max-seconds",
        type=flag_types.positive,
        metavar="S",
        help=(
            "cap on the samples of one scope in one round, in seconds; a sweep over the batches is always finished. "
            f"Default: {_defaults('max_seconds')}"
        ),
    )
    group.add_argument(
        "--max-samples",
        type=flag_types.whole(1),
        metavar="K",
        help=f"likewise, in samples. Default: {defaults['max_samples']} (40 with --preset cpu)",
    )
    group.add_argument(
        "--threads",
        type=flag_types.threads,
        metavar="K",
        help="CPU threads of torch, at most 4 for each CPU. Default: the CPUs this process may use",
    )
    group.add_argument(
        "--denormals",
        choices=("flush", "keep"),
        help=(
            "flush: subnormal numbers count as zero on the CPU, as training on a GPU does; keep: they are "
            "computed, slowly. Default: flush"
        ),
    )

    group.add_argument(
        "--limits",
        type=flag_types.str2bool,
        metavar="BOOL",
        default=True,
        help=(
            "measure the device's copy bandwidth and matrix rate before the first round, which '%% of limit' needs; a "
            "few seconds for the whole run. Default: true"
        ),
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trace (torch.profiler, for TensorBoard)")
    group.add_argument(
        "--schedule",
        type=flag_types.schedule,
        metavar="wait=A,warmup=B,active=C,repeat=D",
        help=(
            "steps of the profiler's schedule. Default: wait=10,warmup=10,active=20,repeat=2 (seed), shorter for "
            "cpu and quick"
        ),
    )
    group.add_argument(
        "--record-shapes", type=flag_types.str2bool, metavar="BOOL", help="record operator input shapes. Default: true"
    )
    group.add_argument(
        "--with-stack", type=flag_types.str2bool, metavar="BOOL", help="record Python stacks. Default: true"
    )
    group.add_argument(
        "--profile-memory", type=flag_types.str2bool, metavar="BOOL", help="record allocations. Default: true"
    )
    group.add_argument(
        "--gzip-traces",
        choices=settings.GZIP_TRACES,
        help="compress the traces; auto: those of more than 50 MB. Default: auto",
    )
    group.add_argument(
        "--memory-snapshot",
        type=flag_types.str2bool,
        metavar="BOOL",
        help=(
            "CUDA: one more step, not profiled, whose allocations go into memory_snapshot.pickle beside the traces "
            "(pytorch.org/memory_viz shows it). Default: false"
        ),
    )


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--log-dir",
        type=flag_types.path,
        default=settings.ROOT / "log",
        metavar="DIR",
        help=(
            "where each run makes its own folder, <name>-<batch size> (then .2, .3 ...: runs never mix). Default:"
            " log/ beside this script"
        ),
    )
    group.add_argument(
        "--timeout",
        type=flag_types.positive,
        default=1800.0,
        metavar="S",
        help="seconds after which one process of one implementation is ended and its row says timeout. Default: 1800",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the newest unfinished run, or sweep, with the same settings instead of starting one",
    )
    group.add_argument(
        "--in-place",
        action="store_true",
        help="run everything in this Python, with what it has installed; use no environment of `make setup`",
    )
    group.add_argument("--quiet", action="store_true", help="no progress on stderr; the table still goes to stdout")
    group.add_argument(
        "--sweep",
        type=grid.axis_of(parser),
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help=(
            "measure at each of these values instead of one; given several times, at all combinations. One folder, "
            f"sweep-KEY, for all; no traces. KEY is one of {', '.join(grid.sweepable(parser))}. Default: no sweep"
        ),
    )

"""The flags of every benchmark script, group by group: units, defaults and what they mean, as ``--help`` shows them."""

from __future__ import annotations

import argparse
import re
from textwrap import fill
from typing import Any, Callable, Dict, Mapping, Optional

from common.cli import flag_types as types
from common.core import paths, settings, workloads
from common.core.settings import DEFAULTS, PRESETS
from common.core.workloads import ESTIMATE

BOOL: Dict[str, Any] = {"type": types.str2bool, "metavar": "BOOL"}
SWITCH = {"action": "store_true"}
#: Each is a process of a second or more, for each implementation.
MOST_ROUNDS = 10_000


def by_preset(key: str, presets: Mapping[str, Mapping[str, Any]] = PRESETS) -> str:
    return ", ".join(f"{values[key]} ({name})" for name, values in presets.items() if key in values)


_SIZES, _KINDS = ("; ".join(map(": ".join, notes.items())) for notes in (settings.PRESET_NOTES, workloads.NOTES))
#: To be read by `add_table`.
EXECUTOR = """\
  --executor: where jobs run: local, one after the other on this machine; ray, on every device of a Ray cluster, whose
    nodes have a checkout of this suite (docs/clusters.md). Default: local
  --ray-address auto|HOST:PORT: of the cluster's head; auto: the one that runs on this machine. Default: auto"""
HELP = f"""
what is measured
  --preset SIZE,WORKLOAD: a size, a workload, or both: cpu,chars. Sizes: {_SIZES}. Workloads: {_KINDS} ({ESTIMATE}).
    Default: seed on CUDA, cpu on a CPU, and bpe500. The flags below override parts of it
  --passes A,B: correctness, timing, memory, trace, or all; each runs in processes of its own. Correctness always comes
    first, and a loss that fails it is not measured. Default: all
  --scope A,B: loss (logits in, gradient of the logits out), step (encoder and decoder outputs through the joiner and
    the loss to their gradients and the joiner's), or both: loss,step. Default: both
  --device: auto, cpu, cuda or cuda:N. Default: auto (CUDA where there is one)
  --dtype: of encoder and decoder outputs, joiner and logits. Default: {DEFAULTS["dtype"]}
  --amp: the joiner's step under torch.autocast with this dtype, as recipes train: outputs and weights stay as --dtype
    says, and a loss that does not take the dtype gets float32 logits. Default: off
  --compile: the joiner under torch.compile, for every loss; reference:compiled also compiles the loss's log-softmax.
    Compiling is not timed. Default: false
  --vocab-size V: symbols, blank included. Default: those of the shape file where it says how many (as files of
    generate_shape_info.py from a corpus do), else {DEFAULTS["vocab_size"]} (50 with --preset quick, 4096 with
    bpe4096-x8, 30 with chars)
  --encoder-dim D: dimension of encoder and decoder outputs and of the joiner's input. Default:
    {DEFAULTS["encoder_dim"]} (32 with --preset quick, at least V there with --pruned-recipe benchmark-2022)
  --logits: random: uniform inputs and weights, as in the 2022 suite, so the posteriors are diffuse; peaky: inputs
    and weights that give one random alignment almost all of the probability, more than a trained model does. Default:
    {DEFAULTS["logits"]}
  --margin NATS: with --logits peaky: by how much the target's logit is above the blank's where the alignment emits it,
    and the blank's above the next target's where it does not. Default: {DEFAULTS["margin"]:g}
  --pruned-recipe: the step of the pruned losses. icefall: projections to V, 0.5 x simple + pruned loss, backward
    through both; benchmark-2022: no projections, backward through the pruned loss alone. Default: icefall
  --prune-range S: symbols that the pruned losses keep for each frame. Default: {DEFAULTS["prune_range"]}
batches
  --shape-file FILE: (T, U) of every utterance, as generate_shape_info.py writes it. Default: the suite's shape_info.pt
  --sort-utterance: true: sort utterances by length and fill batches up to --max-frames; false: --batch-size utterances
    in file order. Default: false
  --batch-size N: utterances in a batch, unsorted. Default: {by_preset("batch_size")}
  --max-frames FRAMES: the largest sum of T in a batch, sorted. Default: {by_preset("max_frames")}
  --batches: which batches are measured: the first in order or the longest, the same in every round; a seeded random
    choice, or a seeded spread over the whole range of lengths, others in every round. Default: random; spread
    with --sort-utterance true
  --num-batches K: how many batches each round measures. Default: {by_preset("num_batches")}; with --find-largest,
    whose throughput is over the utterances of so many of the largest batches: {settings.LARGEST_NUM_BATCHES}
  --seed: of inputs, weights, choice of batches and order of processes. Default: {DEFAULTS["seed"]}
other lengths, from the same utterances (in this order)
  --min-duration S: leave out utterances of the shape file that are shorter, as recipes do (icefall: 1), from their
    frames to 0.03 s. Default: none
  --max-duration S: leave out those that are longer (icefall: 20). Default: none
  --concatenate K: K utterances in a row become one, their T and U added up: long form; --batch-size counts the long
    ones. Default: {DEFAULTS["concatenate"]} (4 with --preset long-form)
  --subsampling: of the front end: the frames that the same audio has after x6 or x8, at least 1; 4 is the shape file as
    it is. Default: {DEFAULTS["subsampling"]} (8 with --preset bpe4096-x8)
  --token-scale F: U is multiplied by F and rounded, for a vocabulary of longer or shorter tokens than BPE 500
    ({ESTIMATE}). Default: {DEFAULTS["token_scale"]:g} (0.66 with --preset bpe4096-x8, 2.66 with chars)
  --frames T: every utterance has T frames, whatever the shape file and --subsampling say. Default: their own
  --tokens U: every utterance has U target tokens, whatever the shape file and --token-scale say. Default: their own
what fits
  --find-largest: instead of the passes: find the largest --batch-size, or --max-frames, whose heaviest batch gets
    through a step, by doubling and bisection, each try in a process of its own; then the throughput at that size, over
    the same utterances for all
  --memory-limit SIZE: what a step may take on top of the loaded process, inputs included: 4GiB, 500MB, or 80%% of the
    device. Enforced: a limit on address space on a CPU; on CUDA the rest of the device is held back. Default: nine
    tenths of what is available now on a CPU, all that is free on CUDA
  --largest-cap K: try nothing above this many utterances or frames. Default: all of the shape file
timing (profiler off)
  --rounds: fresh processes for each implementation, in shuffled order. Default: {DEFAULTS["rounds"]} (6 with --preset
    seed, 1 with quick, {settings.LARGEST_ROUNDS} with --find-largest)
  --spread P%: stop sampling a scope once the 95%% interval of its median is narrower than +-P%%, with every batch
    measured. Default: 2%%
  --max-seconds S: at most so many seconds of samples of one scope in one round; a sweep over the batches is always
    finished. Default: {by_preset("max_seconds")}
  --max-samples K: at most so many samples of one scope in one round, likewise. Default: {by_preset("max_samples")}
  --threads K: CPU threads of torch, at most 4 for each CPU. Default: the CPUs this process may use
  --denormals: flush: subnormal numbers count as zero on the CPU, as training on a GPU does; keep: they are computed,
    slowly. Default: flush
  --allocator: reuse: glibc keeps freed memory on a CPU for the next step, as caching allocators do on a GPU and in
    tuned training; system: tensors above 32 MiB are mapped anew in every step. Default: reuse
  --tf32: CUDA: whether float32 products of the joiner may round their inputs to TF32, set both ways whatever the
    environment says; the correctness pass never does. Default: false
  --l2: CUDA: cold: the L2 cache is written over before each sample, untimed, as nvbench does; warm: it is left with
    what making the inputs put there. Default: cold; warm with --find-largest
  --limits: measure how fast the device moves, multiplies and takes exponentials at the begin of each round, which
    '%% of limit' needs; some two seconds each. Default: true; false with --preset quick, half of whose time it takes
trace (torch.profiler, for TensorBoard)
  --schedule wait=A,warmup=B,active=C,repeat=D: steps of the profiler's schedule. Default:
    wait=10,warmup=10,active=20,repeat=2 (seed), shorter for cpu and quick
  --record-shapes: record operator input shapes. Default: true
  --with-stack: record Python stacks. Default: true
  --profile-memory: record allocations. Default: true
  --gzip-traces: compress the traces; auto: those of more than 50 MB. Default: auto
  --memory-snapshot: CUDA: one more step, not profiled, whose allocations go into memory_snapshot.pickle beside the
    traces (pytorch.org/memory_viz shows it). Default: false
the run
  --log-dir DIR: where each run makes its own folder, <name>-<batch size> (then .2, .3 ...: runs never mix). Default:
    log/ beside this script
  --timeout S: seconds after which one process of one implementation is ended and its row says timeout. Default: 1800
  --wait S: wait at most so long, in all, for a quiet machine to measure those timing rounds again that ran beside other
    load; 0: none is measured again. Default: 60; 0 with --preset quick and --sweep
  --resume: continue the newest unfinished run, or sweep, with the same settings instead of starting one
  --in-place: run everything in this Python, with what it has installed; use no environment of `make setup`
{EXECUTOR}
  --quiet: no progress on stderr; the table still goes to stdout
  --details: print the whole table, and stages, options, limits, errors and notes below it, as in details.txt of
    --log-dir. Default: what they come to, on one screen
"""
SWEEP = """\
  --sweep KEY=A,B,...: measure at each of these values instead of one; given several times, at all combinations. One
    folder, sweep-KEY, for all; no traces. KEY is one of %s. Default: no sweep
"""

#: What --help shows of these flags; --help-all shows all.
SHORT = """\
usage: {prog} [flags]     (--help-all: every flag, with unit and default)

{about}

  --only A,B, --skip A,B          these losses, or all but these (benchmark_all.py --list)
  --preset SIZE,WORKLOAD          seed, cpu or quick; bpe500, chars, bpe4096-x8 or long-form
  --device cpu|cuda|cuda:N        default: CUDA where there is one
  --dtype D                       float32, float64, float16 or bfloat16
  --vocab-size V                  symbols, blank included
  --batch-size N                  utterances in a batch, in file order
  --sort-utterance true           sorted by length instead, in batches of up to --max-frames
  --shape-file FILE               your own (T, U), from generate_shape_info.py
  --min-duration S, --max-duration S  leave out shorter and longer utterances
  --find-largest batch-size       what fits (--memory-limit 16GB), and how fast it trains then
  --sweep vocab-size=500,4096     measure at each of these values
  --passes A,B                    some of correctness, timing, memory, trace
  --rounds K                      fresh processes for each; intervals are over them
  --threads K                     CPU threads
  --log-dir DIR, --resume         where results go; go on after an interruption
  --details                       print stages, options, limits and notes too

examples
  {prog} --preset quick                          a smoke run
  {prog} --device cuda --vocab-size 4096         on my GPU, with my vocabulary
  {prog} --find-largest batch-size --memory-limit 16GB
  {prog} --shape-file mine.pt --min-duration 1 --max-duration 20
  {prog} --sweep vocab-size=500,1000,4096 --frames 100 --tokens 20
"""

#: What each flag takes, in every command: a type, a tuple of choices, or argparse's own arguments.
TAKES: Dict[str, Any] = {
    "--preset": types.preset,
    "--passes": types.some_of(settings.PASSES),
    "--scope": {"type": types.some_of(settings.SCOPES), "dest": "scopes"},
    "--device": {"type": types.device, "default": "auto"},
    "--dtype": settings.DTYPES,
    "--amp": settings.AMP,
    "--compile": BOOL,
    "--logits": settings.LOGITS,
    "--pruned-recipe": ("icefall", "benchmark-2022"),
    "--shape-file": types.path,
    "--sort-utterance": {**BOOL, "nargs": "?", "const": True},
    "--batches": ("first", "longest", "random", "spread"),
    "--subsampling": {"type": int, "choices": (4, 6, 8)},
    "--find-largest": tuple(settings.FIND_LARGEST),
    "--memory-limit": types.memory_size,
    "--spread": types.percentage,
    "--threads": types.threads,
    "--denormals": ("flush", "keep"),
    "--allocator": ("reuse", "system"),
    "--l2": ("cold", "warm"),
    "--limits": BOOL,
    "--executor": {"choices": ("local", "ray"), "default": "local"},
    "--ray-address": {"default": "auto"},
    "--schedule": types.schedule,
    "--gzip-traces": settings.GZIP_TRACES,
    "--format": ("table", "markdown", "csv", "json"),
    "--log-dir": {"type": types.path, "default": paths.LOG},
    "--wait": {"type": types.whole(0)},
    "--timeout": {"type": types.positive, "default": 1800.0},
    **dict.fromkeys(("--tf32", "--record-shapes", "--with-stack", "--profile-memory", "--memory-snapshot"), BOOL),
    "--seed": types.seed,
    "--tokens": types.whole(0),
    "--margin": types.margin,
    **dict.fromkeys(("--encoder-dim", "--batch-size", "--max-frames", "--num-batches"), types.whole(1)),
    **dict.fromkeys(("--concatenate", "--frames", "--largest-cap", "--max-samples"), types.whole(1)),
    **dict.fromkeys(("--vocab-size", "--prune-range"), types.whole(2)),
    "--rounds": types.whole(1, MOST_ROUNDS),
    **dict.fromkeys(("--token-scale", "--max-seconds", "--min-duration", "--max-duration"), types.positive),
    **dict.fromkeys(("--resume", "--in-place", "--quiet", "--details", "--png"), SWITCH),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags every benchmark script takes.  What is not given stays None and is resolved with the preset."""
    run = add_table(parser, HELP)
    of_these = ", ".join(types.sweepable(parser))  # of the flags that are there by now
    add_table(run, SWEEP % of_these, {"--sweep": repeatable(types.axis_of(parser))})


def add_table(to: Any, table: str, takes: Optional[Mapping[str, Any]] = None) -> Any:
    """Add the flags of a table such as HELP to a parser or group: a title for each group, and below it each flag with
    its metavar, and its help after the colon.  takes: as TAKES, and over it.  Returns the last group."""
    group, known = to, {**TAKES, **(takes or {})}
    for line in table.strip().replace("\n    ", " ").split("\n"):
        head, _, text = " ".join(line.split()).partition(": ")
        flag, _, metavar = head.partition(" ")
        if flag.startswith("--"):
            of = known[flag]
            how = of if isinstance(of, dict) else {"choices" if isinstance(of, tuple) else "type": of}
            group.add_argument(flag, help=text, **({**how, "metavar": metavar} if metavar else how))
        else:
            group = to.add_argument_group(line)
    return group


def repeatable(kind: Callable[[str], Any]) -> Dict[str, Any]:
    """What a flag takes that may be given several times."""
    return {"action": "append", "default": [], "type": kind}


def short(prog: str, about: str, chooses: bool) -> str:
    """What --help shows.  about: what the script does, in its first paragraph; chooses: it has --only and --skip."""
    first = " ".join(about.strip().partition("\n\n")[0].split())
    text = SHORT.format(prog=prog, about=fill(first, 100, break_on_hyphens=False))
    return text if chooses else re.sub(r"^  --only .*\n", "", text, flags=re.MULTILINE)

"""Declare every setting of a run in one field of Settings.

From these come the flags of --help, the settings of a run (flags before presets before defaults),
the axes of --sweep, and the words of headings and comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

from rnnt_bench.core import flag_types
from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import BY_UTTERANCE
from rnnt_bench.core.text import closest, count, gathered

PASSES = ("correctness", "timing", "memory", "trace")
SCOPES = ("loss", "step")
#: Stages of training of the small model whose logits can be measured (rnnt_bench.losses.inputs).
STAGES = ("early", "middle", "trained")
LOGITS = ("random", *STAGES)
#: With fewer rounds a change cannot be told from chance.
FEWEST_ROUNDS = 3
#: Rounds of every loss that --budget never cuts: with fewer the interval is wide.
FEWEST_IN_BUDGET = 5

# Environment variables that the suite sets for its processes (rnnt_bench.jobs.job).
#: For the memory pass.  glibc raises this threshold (bytes) as blocks are freed, and keeps freed
#: blocks below it.  A fixed one gives the larger blocks back, so that VmHWM is what is in use.
MEMORY_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
#: For --allocator reuse.  By default glibc maps a tensor above 32 MiB anew in every step.  With
#: these it maps none, and keeps freed memory for the next step, up to 2**40 bytes.
REUSE_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
VARIABLES = {**MEMORY_VARIABLES, **REUSE_VARIABLES}

#: Key of a setting -> its value.
Values = Mapping[str, Any]
#: A part of a heading: a text to format with the value of the setting, such as "V {}", or a
#: function that makes the part from all values.
Heading = str | Callable[[Values], str]


@dataclass(frozen=True)
class Setting:
    """Describe one setting.

    Args:
        default: its value if neither a flag nor a preset sets it.
        group: the title of the group of flags in --help.
        help: its text in --help, with a capital first and no full stop; its default is added.
            A setting with "" has no flag: the preset or a tool sets it.
        short: its sentence in the short --help; "" leaves it out there.
        type: parses the text of the flag, or raises UserError.
        choices: the values that it may have; () for any.
        metavar: the word for the value in --help.
        extra: other arguments of argparse's add_argument.
        presets: its values by size ("quick"), workload ("chars"), or both ("cpu,chars").
        default_text: the default in --help; "" writes it from `default` and `presets`.
        label: its name in comparisons.  "" is for a setting of how a run measures, not what: runs
            with other values can be compared, and --sweep does not take it.
        unset: replaces None in the rows of a comparison, where None means unknown.
        in_rows: whether rows have it even if `label` is "".
        parts_tables: whether rows with different values are in different tables.
        heading: its part of a table's heading; None for no part.
        default_is_usual: whether headings leave out the default.  Then a record without this
            setting, which is older than the setting, also counts as having the default.
        only: (key, values): it has an effect only if `key` has one of these values; ("", ()) if it
            always has.  `key` is that of another setting, "device", or "kind", that of the loss.
        refused: whether it is an error to give it where it has no effect.
        key: the name of its field in Settings; `declared` sets it.
        flag: its flag, such as "--scope"; for "" `declared` makes it from the key.
    """

    default: Any
    group: str
    help: str
    short: str = ""
    type: Callable[[str], Any] = str
    choices: tuple[Any, ...] = ()
    metavar: str | None = None
    extra: Values = field(default_factory=dict)
    presets: Values = field(default_factory=dict)
    default_text: str = ""
    label: str = ""
    unset: str | None = None
    in_rows: bool = False
    parts_tables: bool = True
    heading: Heading | None = None
    default_is_usual: bool = False
    only: tuple[str, tuple[Any, ...]] = ("", ())
    refused: bool = False
    key: str = ""
    flag: str = ""

    def arguments(self) -> Values:
        """Return the arguments of argparse's add_argument for its flag, without help."""
        return {
            "dest": self.key,
            "type": self.type,
            "choices": self.choices or None,
            "metavar": self.metavar,
            **self.extra,
        }

    def help_text(self) -> str:
        """Return the `help` argument of argparse's add_argument, with the default at its end.

        Example: "Number of batches that each round measures. Default: 14 (2 with cpu and quick)"."""
        default = self.default_text
        if not default:
            presets = gathered((worded(value), name) for name, value in self.presets.items())
            in_presets = [f"{value} with {' and '.join(names)}" for value, names in presets.items()]
            default = worded(self.default)
            if in_presets:
                default += f" ({'; '.join(in_presets)})"
        return f"{self.help}. Default: {default}".replace("%", "%%")

    def parse(self, text: str) -> Any:
        """Return the value that the flag has for `text`.  Raises UserError."""
        try:
            value = self.type(text)
        except (TypeError, ValueError):
            raise UserError(f"not a value of {self.flag}: {text!r}") from None
        if self.choices and value not in self.choices:
            raise UserError(f"{text!r} is none of {', '.join(map(str, self.choices))}")
        return value

    def applies(self, values: Values) -> bool:
        """Tell whether the setting has an effect together with other values.

        values: key -> value of the settings, and of "device" and "kind"."""
        needed, accepted = self.only
        return not needed or values.get(needed) in accepted

    def heading_text(self, values: Values) -> str:
        """Return its part of the heading of a table, such as "V 500"; "" for none.

        values: the settings that the rows of the table share."""
        if self.heading is None or not self.applies(values):
            return ""
        if callable(self.heading):
            return self.heading(values)
        value = values.get(self.key)
        if self.default_is_usual and value == self.default:
            return ""
        if value in (None, self.unset):  # `in_rows` replaces None by `unset`
            return ""
        if isinstance(value, bool):
            value = "on" if value else "off"
        return self.heading.format(value)


def declare(default: Any, help: str, group: str, **details: Any) -> Any:
    """Return a dataclass field whose metadata has a Setting with these arguments."""
    return field(
        default_factory=lambda: default,
        metadata={"setting": Setting(default, group, help, **details)},
    )


def flag(key: str) -> str:
    """Return the name of a setting on the command line, without its "--": "vocab-size"."""
    return key.replace("_", "-")


def declared(fields: Sequence[Any]) -> dict[str, Setting]:
    """Return key -> Setting of dataclass fields that `declare` made."""
    settings = {}
    for item in fields:
        setting = item.metadata["setting"]
        name = setting.flag or f"--{flag(item.name)}"
        settings[item.name] = replace(setting, key=item.name, flag=name)
    return settings


def worded(value: Any) -> str:
    """Return a value as the command line has it: "true", "loss,step", "2" for 2.0."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# The groups of --help.
MEASURED = "what is measured"
BATCHES = "batches"
LENGTHS = "other lengths, from the same utterances (in this order)"
TIMING = "timing (profiler off)"
TRACE = "trace (torch.profiler, for TensorBoard)"
_measured = partial(declare, group=MEASURED)
_batches = partial(declare, group=BATCHES)
_lengths = partial(declare, group=LENGTHS)
_timing = partial(declare, group=TIMING)
_trace = partial(declare, group=TRACE)

_BOOL: Values = {"type": flag_types.str2bool, "metavar": "BOOL"}
_SECONDS: Values = {"type": flag_types.positive, "metavar": "S"}
_AS_IN_FILE: Values = {"unset": "as in the shape file", "default_is_usual": True}
_SMALL_SCHEDULE = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}


def _batches_heading(values: Values) -> str:
    """Return the batches in words, such as "batch size 30 (random 14 batches)".

    Settings that are not known (None or not there) are left out."""
    text = ""
    if values.get("sort_utterance"):
        if values.get("max_frames"):
            counted = "padding included" if values.get("max_frames_padded") else "sum of T"
            text = f"max frames {values['max_frames']} ({counted}), sorted"
    elif values.get("batch_size"):
        text = f"batch size {values['batch_size']}"
    if values.get("batches") and values.get("num_batches"):
        text += f" ({values['batches']} {count(values['num_batches'], 'batch')})"
    return text.strip()


def _device_heading(values: Values) -> str:
    """Return the device, its name and the processor, such as "cuda NVIDIA H100"; "" if unknown."""
    keys = ("device", "device_name", "processor")
    return " ".join(str(values[key]) for key in keys if values.get(key))


def _threads_heading(values: Values) -> str:
    """Return "2 threads of 4 cores".

    Return "4 threads" if there are as many cores, or their number is not known.  Return "" on CUDA,
    and if the number of threads is not known."""
    threads = values.get("threads")
    cores = values.get("cores")
    if values.get("device") != "cpu" or threads is None:
        return ""
    return f"{threads} threads" + ("" if cores in (None, threads) else f" of {cores} cores")


@dataclass(frozen=True)
class Settings:
    """Hold the settings of a run, with flags and presets applied (see `resolve`).

    Durations are in seconds.

    Attributes without a flag or with other values than the flag:
        device: "cpu", "cuda" or "cuda:N", never "auto".
        shape_file: relative to the checkout where it is in there, so that runs of two checkouts can
            be compared.
        spread: sampling ends when the 95% interval of the median is this narrow: its half-width is
            a fraction of the median.
        schedule: numbers of steps, as torch.profiler.schedule has them."""

    preset: str = _measured(
        "",
        "How much is measured (a size), of what (a workload), or both: cpu,chars. Other flags override parts of it. "
        f"{flag_types.help_of('Size', flag_types.SIZES)} {flag_types.help_of('Workload', flag_types.WORKLOADS)} "
        f"Note that {flag_types.ESTIMATE}",
        short="Size (full, cpu, quick) and workload (bpe500, chars, ...).",
        type=flag_types.preset,
        metavar="SIZE,WORKLOAD",
        default_text="full on CUDA, cpu on a CPU, and bpe500",
    )
    passes: tuple[str, ...] = _measured(
        PASSES,
        "What to measure: correctness, timing, memory, trace, or all. Each runs in processes of its own. Correctness "
        "always comes first, and a loss that fails it is not measured",
        short="What to measure: some of correctness, timing, memory, trace.",
        type=flag_types.some_of(PASSES),
        metavar="A,B",
        default_text="all",
    )
    scopes: tuple[str, ...] = _measured(
        SCOPES,
        "What a timed step covers. loss: from logits to their gradient; step: from encoder and decoder outputs through "
        "the joiner and the loss to the gradients of the outputs and of the joiner; loss,step: both",
        flag="--scope",
        type=flag_types.some_of(SCOPES),
        metavar="A,B",
        default_text="both",
        in_rows=True,
        parts_tables=False,
    )
    shape_file: str = _batches(
        "shape_info.pt",
        f"File with (T, U) of every utterance, as {command('shapes')} writes it",
        short=f"File with (T, U) of your utterances, from {command('shapes')}.",
        type=flag_types.path,
        metavar="FILE",
        default_text="the suite's shape_info.pt",
    )
    sort_utterance: bool = _batches(
        False,
        "How batches are formed. true: sort utterances by length and fill batches up to --max-frames; false: take "
        "--batch-size utterances in file order",
        short="Sort by length and fill batches up to --max-frames.",
        extra={"nargs": "?", "const": True},
        label="sorted",
        **_BOOL,
    )
    batch_size: int = _batches(
        30,
        "Utterances in a batch that is not sorted by length",
        short="Utterances in a batch, in file order.",
        type=flag_types.Whole(1),
        metavar="N",
        presets={
            "cpu": 2,
            "quick": 2,
            "full,long-form": 8,
            "cpu,long-form": 1,
            "quick,long-form": 1,
        },
        label="batch size",
        only=("sort_utterance", (False,)),
        refused=True,
    )
    max_frames: int = _batches(
        10000,
        "Largest sum of T in a batch of utterances sorted by length, or what --max-frames-padded says",
        type=flag_types.Whole(1),
        metavar="FRAMES",
        presets={"cpu": 1000, "quick": 1000},
        label="max frames",
        only=("sort_utterance", (True,)),
        refused=True,
    )
    max_frames_padded: bool = _batches(
        False,
        "What --max-frames is the most of. false: the sum of T; true: utterances times the longest T, the frames of "
        "the padded batch, as lhotse's max_duration counts since 2022",
        short="Let --max-frames count padding too, as lhotse's max_duration does.",
        extra={"nargs": "?", "const": True},
        label="padded frames",
        only=("sort_utterance", (True,)),
        refused=True,
        default_is_usual=True,
        **_BOOL,
    )
    batches: str = _batches(
        "random",
        "Which batches are measured. first, longest: the same in every round; random, spread: others in every round, "
        "drawn at random or spread over the whole range of lengths",
        choices=("first", "longest", "random", "spread"),
        default_text="random; spread with --sort-utterance true",
        label="choice of batches",
        heading=_batches_heading,
    )
    num_batches: int = _batches(
        14,
        "Number of batches that each round measures",
        presets={"cpu": 2, "quick": 2},
        label="number of batches",
        type=flag_types.Whole(1),
        metavar="K",
    )
    seed: int = _batches(
        20220227,
        "Seed of inputs, weights, the choice of batches and the order of processes",
        type=flag_types.seed,
        label="seed",
    )
    min_duration: float | None = _lengths(
        None,
        "Leave out shorter utterances of the shape file, as recipes do (icefall: 1 s). Durations follow from the "
        "frames, to within 0.03 s",
        short="Leave out shorter utterances.",
        default_text="none",
        label="shortest utterance, s",
        heading="at least {:g} s",
        **_AS_IN_FILE,
        **_SECONDS,
    )
    max_duration: float | None = _lengths(
        None,
        "Leave out longer utterances (icefall: 20 s)",
        short="Leave out longer utterances.",
        default_text="none",
        label="longest utterance, s",
        heading="at most {:g} s",
        **_AS_IN_FILE,
        **_SECONDS,
    )
    concatenate: int = _lengths(
        1,
        "Long form: join each K utterances in a row into one, adding up T and U; --batch-size counts the joined ones",
        presets={"long-form": 4},
        label="utterances as one",
        heading="{} utterances as one",
        default_is_usual=True,
        type=flag_types.Whole(1),
        metavar="K",
    )
    subsampling: int = _lengths(
        4,
        "Subsampling factor of the front end. 4: the shape file as it is; 6, 8: the frames, at least 1, that the same "
        "audio has then",
        type=int,
        choices=(4, 6, 8),
        presets={"bpe4096-x8": 8},
        label="subsampling",
        heading="x{} frames",
        default_is_usual=True,
    )
    token_scale: float = _lengths(
        1.0,
        "Multiply U by F and round it, for a vocabulary of longer or shorter tokens than BPE 500 "
        f"({flag_types.ESTIMATE})",
        type=flag_types.positive,
        metavar="F",
        presets={"bpe4096-x8": 0.66, "chars": 2.66},
        label="token scale",
        heading="{:g} x tokens",
        default_is_usual=True,
    )
    frames: int | None = _lengths(
        None,
        "Give every utterance T frames, whatever the shape file and --subsampling say",
        type=flag_types.Whole(1),
        metavar="T",
        default_text="their own",
        label="T of every utterance",
        heading="T {}",
        **_AS_IN_FILE,
    )
    tokens: int | None = _lengths(
        None,
        "Give every utterance U target tokens, whatever the shape file and --token-scale say",
        type=flag_types.Whole(0),
        metavar="U",
        default_text="their own",
        label="U of every utterance",
        heading="U {}",
        **_AS_IN_FILE,
    )
    logits: str = _measured(
        "random",
        "Kind of logits. random: uniform inputs and weights, as in the 2022 suite, so the posteriors are diffuse; "
        "early, middle, trained: those of a small speech model after 20 steps, in mid-training, and at the end",
        choices=LOGITS,
        label="logits",
        heading="{} logits",
        default_is_usual=True,
    )
    vocab_size: int = _measured(
        500,
        f"Number of symbols, blank included. A shape file that records this number, as {command('shapes')} does for "
        "a corpus, replaces the default",
        short="Number of symbols, blank included.",
        type=flag_types.Whole(2),
        metavar="V",
        presets={"quick": 50, "bpe4096-x8": 4096, "chars": 30},
        label="vocabulary",
        heading="V {}",
    )
    encoder_dim: int = _measured(
        512,
        "Dimension of encoder and decoder outputs and of the joiner's input",
        type=flag_types.Whole(1),
        metavar="D",
        presets={"quick": 32},
        label="joiner dimension",
        heading="joiner {}",
    )
    dtype: str = _measured(
        "float32",
        "Data type of encoder and decoder outputs, joiner and logits",
        short="Data type: float32, float64, float16 or bfloat16.",
        type=flag_types.dtype,
        choices=("float32", "float64", "float16", "bfloat16"),
        label="dtype",
        heading="{}",
    )
    mode: str = _measured(
        "training",
        "What is timed and takes memory. training: forward and backward; forward: the loss without gradients, as "
        "validation computes it",
        choices=("training", "forward"),
        label="mode",
        heading="{} only",
        default_is_usual=True,
    )
    device: str = _measured(
        "auto",
        "Device to measure on: auto, cpu, cuda or cuda:N",
        short="Device to measure on: cpu, cuda or cuda:N.",
        type=flag_types.device,
        extra={"default": "auto"},
        default_text="auto (CUDA where there is one)",
        label="device",
        heading=_device_heading,
    )
    prune_range: int = _measured(
        5,
        "Symbols that the pruned losses keep for each frame",
        type=flag_types.Whole(2),
        metavar="S",
        label="prune range",
        only=("kind", ("pruned",)),
        parts_tables=False,
    )
    durations: str | None = _measured(
        None,
        "Frames that a token (tdt) or a longer blank (multi-blank) may last, in the order of the joiner's columns",
        type=flag_types.durations,
        metavar="D,D",
        default_text="0,1,2,3,4 for tdt; 2,4,8 for multi-blank",
        label="durations",
        unset="the default",
        heading="durations {}",
        only=("kind", ("tdt", "multi-blank")),
    )
    sigma: float | None = _measured(
        None,
        "Number to subtract from the log-probability of each token of tdt and multi-blank",
        type=flag_types.not_negative,
        metavar="NATS",
        default_text="0.05",
        label="sigma",
        unset="the default",
        heading="sigma {:g}",
        only=("kind", ("tdt", "multi-blank")),
    )
    window: int = _measured(
        25,
        "Frames at which --topology windowed lets a target be emitted, around its place in an even alignment",
        type=flag_types.Whole(1),
        metavar="FRAMES",
        label="window",
        heading="windows of {} frames",
        only=("kind", ("windowed",)),
    )
    rounds: int = _timing(
        6,
        "Number of fresh processes for each implementation, in shuffled order; where --budget is not over before",
        short="Fresh processes for each loss; intervals are over them.",
        type=flag_types.Whole(1, 10_000),
        metavar="K",
        presets={"cpu": 10, "quick": 1},
    )
    budget: float | None = _timing(
        None,
        f"Time to spend, such as 90s, 5m or 1h: after {FEWEST_IN_BUDGET} no timing round begins when it is over, none "
        "is repeated either. Where it is given, losses of other environments are left out without --only, and there is "
        "no trace without --passes",
        short="Time to spend, such as 5m: no round begins when it is over.",
        type=flag_types.duration,
        metavar="TIME",
        presets={"cpu": 480.0},
        default_text="480s with cpu, so that a run of all losses ends after five rounds; none with --rounds or --sweep",
    )
    #: Sampling of a scope ends when the interval is this narrow and every batch is measured.
    spread: float = _timing(0.02, "")
    max_seconds: float = _timing(
        60.0,
        "Most seconds of samples of one scope in one round; each batch is sampled at least once",
        presets={"cpu": 0.7, "quick": 0.5},
        **_SECONDS,
    )
    #: Most samples of a scope in a round; each batch is sampled at least once.
    max_samples: int = _timing(28, "", presets={"cpu": 20, "quick": 400})
    threads: int | None = _timing(
        None,
        "Number of torch's CPU threads, at most 4 for each CPU that the process may use",
        short="Number of torch's CPU threads.",
        type=flag_types.threads,
        metavar="K",
        default_text="the CPUs this process may use",
        label="threads",
        heading=_threads_heading,
    )
    denormals: str = _timing(
        "flush",
        "Subnormal numbers on the CPU. flush: count as zero, as in training on a GPU; keep: are computed, slowly",
        choices=("flush", "keep"),
        label="denormals",
        heading="denormals: {}",
        only=("device", ("cpu",)),
    )
    allocator: str = _timing(
        "reuse",
        "Memory on a CPU. reuse: glibc keeps freed memory for the next step, as caching allocators do on a GPU and in "
        "tuned training; system: tensors above 32 MiB are mapped anew in every step",
        choices=("reuse", "system"),
        label="allocator",
        heading="allocator: {}",
        only=("device", ("cpu",)),
    )
    tf32: bool = _timing(
        False,
        "On CUDA: whether float32 products of the joiner may round their inputs to TF32, whatever the environment "
        "says. The correctness pass never does",
        label="tf32",
        heading="TF32: {}",
        only=("device", ("cuda",)),
        refused=True,
        **_BOOL,
    )
    l2: str = _timing(
        "cold",
        "On CUDA: the L2 cache before each sample. cold: is written over, untimed, as nvbench does; warm: keeps what "
        "making the inputs put there",
        choices=("cold", "warm"),
        label="l2",
        heading="L2: {}",
        only=("device", ("cuda",)),
        refused=True,
    )
    schedule: Mapping[str, int] = _trace(
        {"wait": 10, "warmup": 10, "active": 20, "repeat": 2},
        "",
        presets={"cpu": _SMALL_SCHEDULE, "quick": _SMALL_SCHEDULE},
    )
    # Arguments of torch.profiler.profile.
    record_shapes: bool = _trace(True, "")
    with_stack: bool = _trace(True, "")
    profile_memory: bool = _trace(True, "")

    @property
    def suffix(self) -> str:
        """Return the end of the log folder's name: "30", "max-frames-10000"."""
        return f"max-frames-{self.max_frames}" if self.sort_utterance else str(self.batch_size)

    @property
    def own_batches(self) -> bool:
        """Tell whether each timing round has batches of its own; else all rounds have the same."""
        return self.batches in ("random", "spread")

    @property
    def trace_steps(self) -> int:
        """Return the number of steps of the trace pass, each followed by ``prof.step()``."""
        cycle = sum(self.schedule[stage] for stage in ("wait", "warmup", "active"))
        return cycle * self.schedule["repeat"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


#: Key -> the declaration of the setting.
SETTINGS: dict[str, Setting] = declared(fields(Settings))
#: Name on the command line -> a setting that --sweep takes.  These say what is measured, but for
#: the device: a sweep runs on one.
SWEEPABLE = {
    setting.flag[2:]: setting
    for key, setting in SETTINGS.items()
    if setting.label and key != "device"
}


def waits(preset: str, cell: Values) -> bool:
    """Tell whether a run without --wait waits for a quiet machine, to repeat the rounds that other
    load disturbed.

    Quick runs and the cells of a sweep do not wait, and repeat no round.

    cell: the values of --sweep that the run measures; {} without --sweep."""
    # size_and_workload refuses ""; a workload alone has no size either.
    size, _ = flag_types.size_and_workload(preset or flag_types.DEFAULT_WORKLOAD)
    return size != "quick" and not cell


def rounds_of(kind: str, rounds: int) -> int:
    """Return the number of rounds in which a loss of this kind is timed.

    BY_UTTERANCE is measured for its memory, so it is timed in FEWEST_ROUNDS at most.

    rounds: those of the run."""
    return min(rounds, FEWEST_ROUNDS) if kind == BY_UTTERANCE else rounds


def in_rows(values: Values, device: str | None, kind: str | None) -> dict[str, Any]:
    """Return the settings that tell the rows of tables apart: those with `label` or `in_rows`.

    A value is None if it has no effect on the device or kind, or is not known.
    Setting.default_is_usual and Setting.unset say what replaces a value that the record lacks.

    values: the settings of a record; {} for a record that has none.  device: "cpu" or "cuda".
    kind: of the loss."""
    context = {
        **values,
        "device": device,
        "kind": kind,
        "sort_utterance": bool(values.get("sort_utterance")),  # False if the record lacks it
    }
    kept: dict[str, Any] = {}
    for key, setting in SETTINGS.items():
        if setting.label or setting.in_rows:
            kept[key] = None
            if values and setting.applies(context):
                # A record without it may be older than the setting.
                if_absent = setting.default if setting.default_is_usual else None
                value = values.get(key, if_absent)
                kept[key] = setting.unset if value is None else value
    return kept


def described(values: Values, groups: Sequence[str] = (MEASURED, LENGTHS)) -> list[str]:
    """Return in words each setting that has an unusual value, such as "x8 frames".

    Settings without `default_is_usual` are left out.

    groups: those of --help; settings of other groups are left out too."""
    complete = {key: values.get(key, setting.default) for key, setting in SETTINGS.items()}
    texts = [
        setting.heading_text(complete)
        for setting in SETTINGS.values()
        if setting.group in groups and setting.default_is_usual
    ]
    # `heading_text` is "" for a usual value, and for a setting that does not apply.
    return list(filter(None, texts))


def heading(values: Values) -> list[str]:
    """Return the parts of a table's heading, such as ["V 500", "float32"].

    values: the settings that its rows share, as `in_rows` returns them."""
    return [text for setting in SETTINGS.values() if (text := setting.heading_text(values))]


def resolve(flags: Values, device: str) -> Settings:
    """Return the settings of a run: flags win over the preset, which wins over the defaults.

    Of a setting's `presets`, the value for size and workload together wins over that for the
    workload, which wins over that for the size.

    Raises UserError for a flag that has no effect on this device or with the other settings.

    flags: settings by key, None for flags that were not given.  "file_vocab_size" is the number of
    symbols that the shape file records; it replaces the default of vocab_size."""
    size, workload = flag_types.size_and_workload(
        flags.get("preset") or flag_types.DEFAULT_WORKLOAD
    )
    size = size or ("cpu" if device == "cpu" else "full")
    both = f"{size},{workload}"
    names = [size, workload, both]
    values: dict[str, Any] = {}
    for key, setting in SETTINGS.items():
        values[key] = setting.default
        for name in names:  # the later wins
            if name in setting.presets:
                values[key] = setting.presets[name]
        if flags.get(key) is not None:
            values[key] = flags[key]
    values["device"] = device
    values["preset"] = size if workload == flag_types.DEFAULT_WORKLOAD else both
    if flags.get("rounds") is not None and flags.get("budget") is None:
        values["budget"] = None  # the user wants all of these rounds
    is_in_preset = not SETTINGS["vocab_size"].presets.keys().isdisjoint(names)
    if flags.get("file_vocab_size") and flags.get("vocab_size") is None and not is_in_preset:
        values["vocab_size"] = flags["file_vocab_size"]
    # Correctness is always checked; the passes run in the order of PASSES.
    values["passes"] = tuple(name for name in PASSES if name in ("correctness", *values["passes"]))
    if flags.get("batches") is None:
        values["batches"] = "spread" if values["sort_utterance"] else "random"
    _check(flags, values)
    return Settings(**values)


def _check(flags: Values, values: Values) -> None:
    """Raise UserError for a flag that must not be given where it has no effect.

    A flag that switches something off, such as --tf32 false, is accepted everywhere.

    values: all settings of the run."""
    context = {**values, "device": values["device"].partition(":")[0]}  # "cuda" for "cuda:1"
    for key, setting in SETTINGS.items():
        is_refused = setting.refused and flags.get(key) and not setting.applies(context)
        if not is_refused:
            continue
        needed, accepted = setting.only
        if needed == "device":
            raise UserError(
                f"{setting.flag} needs CUDA, and this run uses the CPU: remove {setting.flag}"
            )
        condition = f"{SETTINGS[needed].flag} {' or '.join(map(worded, accepted))}"
        raise UserError(
            f"{setting.flag} only applies with {condition}: add that, or remove {setting.flag}"
        )


def check_kinds(keys: Iterable[str], kinds: Collection[str | None]) -> None:
    """Raise UserError for a flag, such as --sigma, that has no effect on losses of these kinds.

    keys: those of the settings that the user gave by flags; keys of no setting are ignored.
    kinds: those of the measured losses."""
    for setting in (SETTINGS[key] for key in keys if key in SETTINGS):
        needed, accepted = setting.only
        if needed == "kind" and not {*accepted} & {*kinds}:
            losses = f"losses of kind {' or '.join(accepted)}, and none is measured"
            raise UserError(
                f"{setting.flag} only applies to {losses}: name one with --only, or remove {setting.flag}"
            )


class Axis(NamedTuple):
    """Hold the key of a setting, and the values at which --sweep measures it."""

    key: str
    values: tuple[Any, ...]


def axis(text: str) -> Axis:
    """Parse a value of --sweep: "vocab-size=500,1000", with values as --vocab-size takes them.

    Raises UserError for a setting that is not in SWEEPABLE, and for a wrong, repeated or missing
    value."""
    name, _, listed = text.partition("=")
    name = name.strip()
    texts = flag_types.split(listed)
    setting = SWEEPABLE.get(flag(name))
    if setting is None:
        choices = f"{', '.join(SWEEPABLE)}{closest(flag(name), SWEEPABLE)}"
        raise UserError(f"{text!r}: give KEY=VALUE,VALUE,... with one of {choices}")
    if not texts:
        raise UserError(f"{text!r}: give at least one value, as in {name}=A,B")
    try:
        values = tuple(map(setting.parse, texts))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    repeated = [value for value in values if values.count(value) > 1]
    if repeated:
        raise UserError(f"{name}: {repeated[0]} is given twice")
    return Axis(setting.key, values)


def cells(axes: Sequence[Axis]) -> list[Values]:
    """Return all combinations of the axes' values, {key: value} each.

    The values of the last axis vary fastest."""
    keys = [axis.key for axis in axes]
    combinations = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(keys, values)) for values in combinations]


def words(cell: Values) -> str:
    """Return the values of a sweep's cell in words: "vocab-size 500, dtype float32"."""
    return ", ".join(f"{flag(str(key))} {worded(value)}" for key, value in cell.items())


def check_axes(axes: Sequence[Axis], flags: Values) -> None:
    """Raise UserError for a setting that --sweep names twice, or that a flag gives too."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(
                f"--sweep {flag(key)} is given twice: name all values in one, as in {flag(key)}=A,B"
            )
        if flags.get(key) is not None:
            raise UserError(f"--sweep {flag(key)}: --{flag(key)} is given too; remove one of them")

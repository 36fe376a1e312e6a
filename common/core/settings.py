"""Every setting of a run, each declared in one field, and how flags, presets, defaults and --sweep become settings."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

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
#: Rounds of every loss, before --budget ends anything: over fewer the interval is wide.
FEWEST_IN_BUDGET = 5

#: Variables of the environment that the suite itself gives to its processes (rnnt_bench.jobs.job).  glibc keeps freed
#: blocks below a threshold that moves; with a fixed one (bytes), VmHWM tells what is in use.
MEMORY_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
#: glibc maps tensors above 32 MiB anew in every step, unless it may not map at all and keeps what is freed (bytes).
REUSE_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
VARIABLES = {**MEMORY_VARIABLES, **REUSE_VARIABLES}

#: Part of a heading: a text to format with the value, or a function that makes it from the settings of the rows.
Heading = Union[str, Callable[[Mapping[str, Any]], str]]


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        default: its value where neither a flag nor a preset gives another.
        group: the title of its flags in --help.
        help: for --help: a capital first, no full stop at the end; its default is added.  "" gives it no flag: the
            preset or a tool sets it.
        short: the sentence of the short --help; "" leaves it out there.
        type: turns the flag's text into a value, or raises UserError.
        extra: other arguments of argparse's add_argument.
        presets: its values by size ("quick"), workload ("chars"), or both ("cpu,chars").
        default_text: how --help words the default; "" words it from `default` and `presets`.
        label: how a comparison names it.  "" means that runs with other values can be compared.
        unset: the word for None in comparisons, where None would say that nothing is known.
        in_rows: whether rows keep it though `label` is "".
        parts_tables: whether rows with other values stand in other tables.
        heading_of_default: whether a table's heading also says so of the default.
        only: (key, values) of the setting, or "device" or "kind", without which this one has no effect.
        refused: whether giving it without `only` is an error.
        sweepable: whether --sweep takes it: it says what is measured, and not how.
        key, flag: set by `declared`; the flag is by default the key with dashes.
    """

    default: Any
    group: str
    help: str
    short: str = ""
    type: Callable[[str], Any] = str
    choices: Tuple[Any, ...] = ()
    metavar: Optional[str] = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Any] = field(default_factory=dict)
    default_text: str = ""
    label: str = ""
    unset: Optional[str] = None
    in_rows: bool = False
    parts_tables: bool = True
    heading: Optional[Heading] = None
    heading_of_default: bool = True
    only: Optional[Tuple[str, Tuple[Any, ...]]] = None
    refused: bool = False
    sweepable: bool = True
    key: str = ""
    flag: str = ""

    def arguments(self) -> Dict[str, Any]:
        """Return what argparse's add_argument takes for the flag, but its help."""
        return {
            "dest": self.key,
            **({"choices": self.choices} if self.choices else {}),
            **({"type": self.type} if self.type is not str else {}),
            **({"metavar": self.metavar} if self.metavar else {}),
            **self.extra,
        }

    def help_text(self) -> str:
        """Return the help of the flag with its default, as argparse takes it."""
        names_of = gathered((worded(value), name) for name, value in self.presets.items())
        others = "; ".join(f"{value} with {' and '.join(names)}" for value, names in names_of.items())
        default = self.default_text or worded(self.default) + (f" ({others})" if others else "")
        return f"{self.help}. Default: {default}".replace("%", "%%")

    def parse(self, text: str) -> Any:
        """Return the value that the flag would give for `text`.  Raises UserError."""
        try:
            value = self.type(text)
        except (TypeError, ValueError):
            raise UserError(f"not a value of {self.flag}: {text!r}") from None
        if self.choices and value not in self.choices:
            raise UserError(f"{text!r} is none of {', '.join(map(str, self.choices))}")
        return value

    def applies(self, known: Mapping[str, Any]) -> bool:
        """Tell whether the setting has an effect beside these settings, "device" and "kind"."""
        return self.only is None or known.get(self.only[0]) in self.only[1]

    def heading_text(self, known: Mapping[str, Any]) -> str:
        """Return what a heading says of the setting, from what is known of the rows; "" for nothing."""
        if self.heading is None or not self.applies(known):
            return ""
        if not isinstance(self.heading, str):
            return self.heading(known)
        value = known.get(self.key)
        if value is None or value == self.unset or (value == self.default and not self.heading_of_default):
            return ""
        return self.heading.format("on" if value is True else "off" if value is False else value)


def setting(default: Any, help: str, group: str, **details: Any) -> Any:
    """Return the dataclass field that declares a setting; the arguments are those of Setting."""
    return field(default_factory=lambda: default, metadata={"setting": Setting(default, group, help, **details)})


def flag(key: str) -> str:
    """Return a setting as it is written on the command line: "vocab-size"."""
    return key.replace("_", "-")


def declared(fields: Sequence[Any]) -> Dict[str, Setting]:
    """Return the settings that dataclass fields declare, by name."""
    known = {item.name: item.metadata["setting"] for item in fields}
    return {key: replace(value, key=key, flag=value.flag or f"--{flag(key)}") for key, value in known.items()}


def worded(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={amount}" for key, amount in value.items())
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# The groups of --help.
MEASURED, BATCHES, LENGTHS, TIMING, TRACE = (
    "what is measured",
    "batches",
    "other lengths, from the same utterances (in this order)",
    "timing (profiler off)",
    "trace (torch.profiler, for TensorBoard)",
)
_measured, _of_batches, _of_lengths, _of_timing, _of_trace = (
    partial(setting, group=title) for title in (MEASURED, BATCHES, LENGTHS, TIMING, TRACE)
)


def _takes(type: Callable[[str], Any], metavar: str) -> Dict[str, Any]:
    return {"type": type, "metavar": metavar}


def _unusual(heading: str) -> Dict[str, Any]:
    """Return the details of a setting that a heading names where it is not the default."""
    return {"heading": heading, "heading_of_default": False}


_BOOL, _COUNT = _takes(flag_types.str2bool, "BOOL"), _takes(flag_types.whole(1), "K")
_SECONDS = _takes(flag_types.positive, "S")
_HOW: Dict[str, Any] = {"sweepable": False}  # how a run measures, not what
_ON_CPU: Dict[str, Any] = {"only": ("device", ("cpu",))}
_ON_CUDA: Dict[str, Any] = {"only": ("device", ("cuda",)), "refused": True}
_OF_PRUNED: Dict[str, Any] = {"only": ("kind", ("pruned",)), "parts_tables": False}
_AS_IN_FILE: Dict[str, Any] = {"unset": "as in the shape file", "heading_of_default": False}
_SMALL_SCHEDULE = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}


def _batches_heading(known: Mapping[str, Any]) -> str:
    """Return "batch size 30 (random 14 batches)", without parts that are not known."""
    counted = "padding included" if known.get("max_frames_padded") else "sum of T"
    if known.get("sort_utterance"):
        text = f"max frames {known['max_frames']} ({counted}), sorted" if known.get("max_frames") else ""
    else:
        text = f"batch size {known['batch_size']}" if known.get("batch_size") else ""
    if known.get("batches") and known.get("num_batches"):
        text += f" ({known['batches']} {count(known['num_batches'], 'batch')})"
    return text.strip()


def _threads_heading(known: Mapping[str, Any]) -> str:
    """Return "2 threads of 4 cores", on a CPU."""
    if known.get("device") != "cpu" or known.get("threads") is None:
        return ""
    spare = known.get("cores") not in (None, known["threads"])
    return f"{known['threads']} threads" + (f" of {known['cores']} cores" if spare else "")


@dataclass(frozen=True)
class Settings:
    """The settings of a run as resolved.

    `device` is "cpu", "cuda" or "cuda:N"; `shape_file` is relative to the suite where it lies in there, so that runs of
    two checkouts can be compared; `spread` is the half-width of the interval as a fraction of the median; `schedule`
    counts steps; durations are in seconds."""

    preset: str = _measured(
        "",
        "How much is measured (a size), of what (a workload), or both: cpu,chars. Other flags override parts of it. "
        f"{flag_types.listed('Size', flag_types.SIZES)} {flag_types.listed('Workload', flag_types.WORKLOADS)} "
        f"Note that {flag_types.ESTIMATE}",
        short="Size (full, cpu, quick) and workload (bpe500, chars, ...).",
        **_takes(flag_types.preset, "SIZE,WORKLOAD"),
        default_text="full on CUDA, cpu on a CPU, and bpe500",
        **_HOW,
    )
    passes: Tuple[str, ...] = _measured(
        PASSES,
        "What to measure: correctness, timing, memory, trace, or all. Each runs in processes of its own. Correctness "
        "always comes first, and a loss that fails it is not measured",
        short="What to measure: some of correctness, timing, memory, trace.",
        **_takes(flag_types.some_of(PASSES), "A,B"),
        default_text="all",
        **_HOW,
    )
    scopes: Tuple[str, ...] = _measured(
        SCOPES,
        "What a timed step covers. loss: from logits to their gradient; step: from encoder and decoder outputs through "
        "the joiner and the loss to the gradients of the outputs and of the joiner; loss,step: both",
        flag="--scope",
        **_takes(flag_types.some_of(SCOPES), "A,B"),
        default_text="both",
        in_rows=True,
        parts_tables=False,
        **_HOW,
    )
    shape_file: str = _of_batches(
        "shape_info.pt",
        f"File with (T, U) of every utterance, as {command('shapes')} writes it",
        short=f"File with (T, U) of your utterances, from {command('shapes')}.",
        **_takes(flag_types.path, "FILE"),
        default_text="the suite's shape_info.pt",
        **_HOW,
    )
    sort_utterance: bool = _of_batches(
        False,
        "How batches are formed. true: sort utterances by length and fill batches up to --max-frames; false: take "
        "--batch-size utterances in file order",
        short="Sort by length and fill batches up to --max-frames.",
        extra={"nargs": "?", "const": True},
        label="sorted",
        **_BOOL,
    )
    batch_size: int = _of_batches(
        30,
        "Utterances in a batch that is not sorted by length",
        short="Utterances in a batch, in file order.",
        **_takes(flag_types.whole(1), "N"),
        presets={"cpu": 2, "quick": 2, "full,long-form": 8, "cpu,long-form": 1, "quick,long-form": 1},
        label="batch size",
        only=("sort_utterance", (False,)),
        refused=True,
    )
    max_frames: int = _of_batches(
        10000,
        "Largest sum of T in a batch of utterances sorted by length, or what --max-frames-padded says",
        **_takes(flag_types.whole(1), "FRAMES"),
        presets={"cpu": 1000, "quick": 1000},
        label="max frames",
        only=("sort_utterance", (True,)),
        refused=True,
    )
    max_frames_padded: bool = _of_batches(
        False,
        "What --max-frames is the most of. false: the sum of T; true: utterances times the longest T, the frames of "
        "the padded batch, as lhotse's max_duration counts since 2022.",
        short="Let --max-frames count padding too, as lhotse's max_duration does.",
        extra={"nargs": "?", "const": True},
        label="padded frames",
        only=("sort_utterance", (True,)),
        refused=True,
        heading_of_default=False,
        **_BOOL,
    )
    batches: str = _of_batches(
        "random",
        "Which batches are measured. first, longest: the same in every round; random, spread: others in every round, "
        "drawn at random or spread over the whole range of lengths",
        choices=("first", "longest", "random", "spread"),
        default_text="random; spread with --sort-utterance true",
        label="choice of batches",
        heading=_batches_heading,
    )
    num_batches: int = _of_batches(
        14,
        "Number of batches that each round measures",
        presets={"cpu": 2, "quick": 2},
        label="number of batches",
        **_COUNT,
    )
    seed: int = _of_batches(
        20220227,
        "Seed of inputs, weights, the choice of batches and the order of processes",
        type=flag_types.seed,
        label="seed",
    )
    min_duration: Optional[float] = _of_lengths(
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
    max_duration: Optional[float] = _of_lengths(
        None,
        "Leave out longer utterances (icefall: 20 s)",
        short="Leave out longer utterances.",
        default_text="none",
        label="longest utterance, s",
        heading="at most {:g} s",
        **_AS_IN_FILE,
        **_SECONDS,
    )
    concatenate: int = _of_lengths(
        1,
        "Long form: join each K utterances in a row into one, adding up T and U; --batch-size counts the joined ones",
        presets={"long-form": 4},
        label="utterances as one",
        **_unusual("{} utterances as one"),
        **_COUNT,
    )
    subsampling: int = _of_lengths(
        4,
        "Subsampling factor of the front end. 4: the shape file as it is; 6, 8: the frames, at least 1, that the same "
        "audio has then",
        type=int,
        choices=(4, 6, 8),
        presets={"bpe4096-x8": 8},
        label="subsampling",
        **_unusual("x{} frames"),
    )
    token_scale: float = _of_lengths(
        1.0,
        "Multiply U by F and round it, for a vocabulary of longer or shorter tokens than BPE 500 "
        f"({flag_types.ESTIMATE})",
        **_takes(flag_types.positive, "F"),
        presets={"bpe4096-x8": 0.66, "chars": 2.66},
        label="token scale",
        **_unusual("{:g} x tokens"),
    )
    frames: Optional[int] = _of_lengths(
        None,
        "Give every utterance T frames, whatever the shape file and --subsampling say",
        **_takes(flag_types.whole(1), "T"),
        default_text="their own",
        label="T of every utterance",
        heading="T {}",
        **_AS_IN_FILE,
    )
    tokens: Optional[int] = _of_lengths(
        None,
        "Give every utterance U target tokens, whatever the shape file and --token-scale say",
        **_takes(flag_types.whole(0), "U"),
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
        **_unusual("{} logits"),
    )
    vocab_size: int = _measured(
        500,
        f"Number of symbols, blank included. A shape file that records this number, as {command('shapes')} does for "
        "a corpus, replaces the default",
        short="Number of symbols, blank included.",
        **_takes(flag_types.whole(2), "V"),
        presets={"quick": 50, "bpe4096-x8": 4096, "chars": 30},
        label="vocabulary",
        heading="V {}",
    )
    encoder_dim: int = _measured(
        512,
        "Dimension of encoder and decoder outputs and of the joiner's input",
        **_takes(flag_types.whole(1), "D"),
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
        **_unusual("{} only"),
    )
    device: str = _measured(
        "auto",
        "Device to measure on: auto, cpu, cuda or cuda:N",
        short="Device to measure on: cpu, cuda or cuda:N.",
        type=flag_types.device,
        extra={"default": "auto"},
        default_text="auto (CUDA where there is one)",
        label="device",
        heading=lambda known: " ".join(
            str(known[key]) for key in ("device", "device_name", "processor") if known.get(key)
        ),
        **_HOW,
    )
    prune_range: int = _measured(
        5,
        "Symbols that the pruned losses keep for each frame",
        **_takes(flag_types.whole(2), "S"),
        label="prune range",
        **_OF_PRUNED,
    )
    durations: Optional[str] = _measured(
        None,
        "Frames that a token (tdt) or a longer blank (multi-blank) may last, in the order of the joiner's columns",
        **_takes(flag_types.durations, "D,D"),
        default_text="0,1,2,3,4 for tdt; 2,4,8 for multi-blank",
        label="durations",
        unset="the default",
        heading="durations {}",
        only=("kind", ("tdt", "multi-blank")),
    )
    sigma: Optional[float] = _measured(
        None,
        "Number to subtract from the log-probability of each token of tdt and multi-blank",
        **_takes(flag_types.not_negative, "NATS"),
        default_text="0.05",
        label="sigma",
        unset="the default",
        heading="sigma {:g}",
        only=("kind", ("tdt", "multi-blank")),
    )
    window: int = _measured(
        25,
        "Frames at which --topology windowed lets a target be emitted, around its place in an even alignment",
        **_takes(flag_types.whole(1), "FRAMES"),
        label="window",
        heading="windows of {} frames",
        only=("kind", ("windowed",)),
    )
    rounds: int = _of_timing(
        6,
        "Number of fresh processes for each implementation, in shuffled order; where --budget is not over before",
        short="Fresh processes for each loss; intervals are over them.",
        **_takes(flag_types.whole(1, 10_000), "K"),
        presets={"cpu": 10, "quick": 1},
        **_HOW,
    )
    budget: Optional[float] = _of_timing(
        None,
        f"Time to spend, such as 90s, 5m or 1h: after {FEWEST_IN_BUDGET} no timing round begins when it is over, none "
        "is repeated either. Where it is given, losses of other environments are left out without --only, and there is "
        "no trace without --passes",
        short="Time to spend, such as 5m: no round begins when it is over.",
        **_takes(flag_types.duration, "TIME"),
        presets={"cpu": 480.0},
        default_text="480s with cpu, so that a run of all losses ends after five rounds; none with --rounds or --sweep",
        **_HOW,
    )
    #: Sampling of a scope ends when every batch is measured and the 95% interval of its median is narrower than this.
    spread: float = _of_timing(0.02, "", **_HOW)
    max_seconds: float = _of_timing(
        60.0,
        "Most seconds of samples of one scope in one round; each batch is sampled at least once",
        presets={"cpu": 0.7, "quick": 0.5},
        **_SECONDS,
        **_HOW,
    )
    #: Samples of a scope in a round, at most, but for one of each batch.
    max_samples: int = _of_timing(28, "", presets={"cpu": 20, "quick": 400}, **_HOW)
    threads: Optional[int] = _of_timing(
        None,
        "Number of torch's CPU threads, at most 4 for each CPU that the process may use",
        short="Number of torch's CPU threads.",
        **_takes(flag_types.threads, "K"),
        default_text="the CPUs this process may use",
        label="threads",
        heading=_threads_heading,
    )
    denormals: str = _of_timing(
        "flush",
        "Subnormal numbers on the CPU. flush: count as zero, as in training on a GPU; keep: are computed, slowly",
        choices=("flush", "keep"),
        label="denormals",
        heading="denormals: {}",
        **_ON_CPU,
    )
    allocator: str = _of_timing(
        "reuse",
        "Memory on a CPU. reuse: glibc keeps freed memory for the next step, as caching allocators do on a GPU and in "
        "tuned training; system: tensors above 32 MiB are mapped anew in every step",
        choices=("reuse", "system"),
        label="allocator",
        heading="allocator: {}",
        **_ON_CPU,
    )
    tf32: bool = _of_timing(
        False,
        "On CUDA: whether float32 products of the joiner may round their inputs to TF32, whatever the environment "
        "says. The correctness pass never does",
        label="tf32",
        heading="TF32: {}",
        **_ON_CUDA,
        **_BOOL,
    )
    l2: str = _of_timing(
        "cold",
        "On CUDA: the L2 cache before each sample. cold: is written over, untimed, as nvbench does; warm: keeps what "
        "making the inputs put there",
        choices=("cold", "warm"),
        label="l2",
        heading="L2: {}",
        **_ON_CUDA,
    )
    #: Steps of the profiler's schedule.
    schedule: Mapping[str, int] = _of_trace(
        {"wait": 10, "warmup": 10, "active": 20, "repeat": 2},
        "",
        presets={"cpu": _SMALL_SCHEDULE, "quick": _SMALL_SCHEDULE},
        **_HOW,
    )
    #: What a trace has beside times: shapes of operators' inputs, Python's stacks, allocations.
    record_shapes: bool = _of_trace(True, "", **_HOW)
    with_stack: bool = _of_trace(True, "", **_HOW)
    profile_memory: bool = _of_trace(True, "", **_HOW)

    @property
    def suffix(self) -> str:
        """Return how the log folder's name ends: "30", "max-frames-10000"."""
        return f"max-frames-{self.max_frames}" if self.sort_utterance else str(self.batch_size)

    @property
    def own_batches(self) -> bool:
        """Tell whether each timing round measures batches that no other round has; else all rounds have the same."""
        return self.batches in ("random", "spread")

    @property
    def trace_steps(self) -> int:
        """Return the number of steps of the trace pass, each followed by ``prof.step()``."""
        return sum(self.schedule[of] for of in ("wait", "warmup", "active")) * self.schedule["repeat"]

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings that `data` has, with defaults for the others; ignore other keys."""
        known = {key: value for key, value in data.items() if key in SETTINGS}
        values: Dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in known.items()}
        return cls(**values)


#: The declaration of every setting, by name.
SETTINGS: Dict[str, Setting] = declared(fields(Settings))
SWEEPABLE = {value.flag[2:]: value for value in SETTINGS.values() if value.sweepable}


def waits(preset: str, cell: Mapping[str, Any]) -> bool:
    """Tell whether a run without --wait waits for a quiet machine to repeat rounds beside other load. cell: its values
    of --sweep."""
    return flag_types.parts(preset or flag_types.DEFAULT_WORKLOAD)[0] != "quick" and not cell


def rounds_of(kind: str, rounds: int) -> int:
    """Return in how many of the rounds of a run a loss of this kind is timed: by utterance, which is for its memory, in
    as few as tell its time."""
    return min(rounds, FEWEST_ROUNDS) if kind == BY_UTTERANCE else rounds


def in_rows(values: Mapping[str, Any], device: Optional[str], kind: Optional[str]) -> Dict[str, Any]:
    """Return the settings by which rows are compared or told apart, from those of a record.  None: the record does not
    have it, or it has no effect on this device ("cpu", "cuda") or kind of loss."""
    known = {**values, "device": device, "kind": kind, "sort_utterance": bool(values.get("sort_utterance"))}
    kept = {}
    for key, declaration in SETTINGS.items():
        if not (declaration.label or declaration.in_rows):
            continue
        older = bool(values) and not declaration.heading_of_default  # a record from before the setting
        value = values.get(key, declaration.default if older else None)
        if value is None and values:
            value = declaration.unset
        kept[key] = value if declaration.applies(known) else None
    return kept


def described(values: Mapping[str, Any], groups: Sequence[str] = (MEASURED, LENGTHS)) -> List[str]:
    """Return what is not default of a run's settings, in a few words each.  groups: those of --help to look at."""
    known = {key: values.get(key, declaration.default) for key, declaration in SETTINGS.items()}
    chosen = [value for value in SETTINGS.values() if value.group in groups and not value.heading_of_default]
    return [text for value in chosen if (text := value.heading_text(known))]


def heading(known: Mapping[str, Any]) -> List[str]:
    """Return the parts of a table's heading, from what is known of its rows (see `in_rows`)."""
    return [text for value in SETTINGS.values() if (text := value.heading_text(known))]


def resolve(given: Mapping[str, Any], device: str) -> Settings:
    """Return the settings of a run: what is `given`, else what the preset says, else the defaults.

    given: with "file_vocab_size", symbols of the shape file, the default of sizes without a vocabulary of their own.
    Raises UserError for a setting that has no effect on this device or beside the others."""
    size, workload = flag_types.parts(given.get("preset") or flag_types.DEFAULT_WORKLOAD)
    size = size or ("cpu" if device == "cpu" else "full")
    names = [size, workload, f"{size},{workload}"]
    preset = size if workload == flag_types.DEFAULT_WORKLOAD else f"{size},{workload}"
    values: Dict[str, Any] = {"device": device, "preset": preset}
    for key, declaration in SETTINGS.items():
        chosen = [declaration.presets[name] for name in names if name in declaration.presets]
        if given.get(key) is not None:
            chosen.append(given[key])
        values.setdefault(key, chosen[-1] if chosen else declaration.default)
    if given.get("rounds") is not None and given.get("budget") is None:
        values["budget"] = None  # all of them
    vocabulary = SETTINGS["vocab_size"]
    if given.get("file_vocab_size") and given.get("vocab_size") is None and not set(names) & set(vocabulary.presets):
        values["vocab_size"] = given["file_vocab_size"]
    values["passes"] = tuple(name for name in PASSES if name in ("correctness", *values["passes"]))
    if given.get("batches") is None:
        values["batches"] = "spread" if values["sort_utterance"] else "random"
    _check(given, values)
    return Settings(**values)


def _check(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that was given and has no effect beside the others."""
    known = {**values, "device": values["device"].partition(":")[0]}
    for key, declaration in SETTINGS.items():
        if not declaration.refused or not given.get(key) or declaration.applies(known):
            continue
        needed, accepted = declaration.only or ("", ())
        if needed == "device":
            raise UserError(f"{declaration.flag} needs CUDA, and this run uses the CPU: remove {declaration.flag}")
        condition = f"{SETTINGS[needed].flag} {' or '.join(map(worded, accepted))}"
        raise UserError(f"{declaration.flag} only applies with {condition}: add that, or remove {declaration.flag}")


def check_kinds(keys: Iterable[str], kinds: Collection[Optional[str]]) -> None:
    """Raise UserError for a setting of `keys` that no loss of these kinds has."""
    for setting in (SETTINGS[key] for key in keys if key in SETTINGS):
        needed, accepted = setting.only or ("", ())
        if needed == "kind" and not {*accepted} & {*kinds}:
            which = f"losses of kind {' or '.join(accepted)}, and none is measured"
            raise UserError(f"{setting.flag} only applies to {which}: name one with --only, or remove {setting.flag}")


class Axis(NamedTuple):
    """Hold a setting, by its key in Settings, and the values that it is given."""

    key: str
    values: Tuple[Any, ...]


def axis(text: str) -> Axis:
    """Parse "vocab-size=500,1000", with values as --vocab-size takes them.  Raises UserError."""
    name, listed = text.partition("=")[0].strip(), text.partition("=")[2].split(",")
    setting = SWEEPABLE.get(flag(name))
    if setting is None:
        advice = f"{', '.join(SWEEPABLE)}{closest(flag(name), SWEEPABLE)}"
        raise UserError(f"{text!r}: give KEY=VALUE,VALUE,... with one of {advice}")
    if not any(map(str.strip, listed)):
        raise UserError(f"{text!r}: give at least one value, as in {name}=A,B")
    try:
        values = tuple(setting.parse(word.strip()) for word in listed if word.strip())
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    repeated = [str(value) for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise UserError(f"{name}: {repeated[0]} is given twice")
    return Axis(setting.key, values)


def cells(axes: Sequence[Axis]) -> List[Dict[str, Any]]:
    """Return all combinations, the values of the last axis varying fastest."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values)) for values in itertools.product(*(axis.values for axis in axes))]


def words(cell: Mapping[str, Any]) -> str:
    """Return a cell in words, such as "vocab-size 500, dtype float32"."""
    return ", ".join(f"{flag(str(key))} {worded(value)}" for key, value in cell.items())


def check_axes(axes: Sequence[Axis], given: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that is swept twice, or both swept and given."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {flag(key)} is given twice: name all values in one, as in {flag(key)}=A,B")
        if given.get(key) is not None:
            raise UserError(f"--sweep {flag(key)}: --{flag(key)} is given too; remove one of them")

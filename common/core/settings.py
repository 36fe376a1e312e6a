"""Every choice of a run as plain data: the presets, the settings they resolve to, and their JSON form for worker
processes.

No torch here: the parent process, which only plans and waits, reads this too.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from common.core import workloads
from common.core.errors import UserError

PASSES = ("correctness", "timing", "memory", "trace")
SCOPES = ("loss", "step")
LOGITS = ("random", "peaky")
DTYPES = ("float32", "float64", "float16", "bfloat16")
AMP = ("bfloat16", "float16")
GZIP_TRACES = ("auto", "true", "false")
#: What --find-largest searches the largest of, and whether that is of sorted utterances.
FIND_LARGEST = {"batch-size": False, "max-frames": True}

#: The throughput of --find-largest is over the utterances of so many of the largest batches.
LARGEST_NUM_BATCHES = 2
LARGEST_ROUNDS = 3

_SMALL = {"batch_size": 2, "max_frames": 1000, "schedule": {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}}
#: What is specific to a preset; everything else has one default, in Settings.
PRESETS: Dict[str, Dict[str, Any]] = {
    "seed": {
        **{"batch_size": 30, "max_frames": 10000, "num_batches": 14, "rounds": 6, "max_seconds": 60.0},
        "max_samples": 28,
        "schedule": {"wait": 10, "warmup": 10, "active": 20, "repeat": 2},
    },
    "cpu": {**_SMALL, "num_batches": 2, "rounds": 10, "max_seconds": 0.7, "max_samples": 20},
    "quick": {
        **_SMALL,
        "num_batches": 2,
        "vocab_size": 50,
        "encoder_dim": 32,
        "rounds": 1,
        "max_seconds": 0.5,
        "max_samples": 400,
    },
}

#: Variables of the environment that the suite itself gives to its processes (common.jobs.spec).  glibc keeps freed
#: blocks below a threshold that moves; with a fixed one (bytes), VmHWM tells what is in use.
MEMORY_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
#: Each further arena of glibc would reserve 64 MB of address space.
PROBE_VARIABLES = {**MEMORY_VARIABLES, "MALLOC_ARENA_MAX": "1"}
#: glibc maps tensors above 32 MiB anew in every step, unless it may not map at all and keeps what is freed (bytes).
REUSE_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
VARIABLES = {**PROBE_VARIABLES, **REUSE_VARIABLES}

#: Presets for which the limits of the device would take too much of the time.
WITHOUT_LIMITS = ("quick",)

PRESET_NOTES = {
    "seed": "the full size: batches of 30 utterances (or 10,000 frames when sorted), 80 of them",
    "cpu": "sized for a CPU: real utterance shapes and vocabulary, but batches of 2 utterances (or 1,000 frames when "
    "sorted); about a minute of measuring for each implementation on two cores.  --preset seed is the full size",
    "quick": "a smoke run: small joiner and vocabulary, one round; a quarter of a minute for each implementation, most "
    "of it start-up.  Its numbers compare nothing",
}


@dataclass(frozen=True)
class Settings:
    """The flags of a run as resolved.  `shape_file` is relative to the suite where it lies in there, so that runs
    of two checkouts can be compared; `max_seconds` is the cap on timed samples of one scope in one round, in seconds;
    `spread` the wanted half-width of the 95% interval of the median, as a fraction of it; `schedule` counts steps;
    `preset` is as `preset_parts` reads it; `min_duration` and `max_duration` are in seconds; `subsampling` to `tokens`
    are explained in common.data.variations, `logits` and `margin` (nats) in common.losses.peaky; `memory_limit` is as
    it was given ("4GiB", "80%"), `largest_cap` in the unit of what `find_largest` searches."""

    device: str
    preset: str
    batch_size: int
    max_frames: int
    num_batches: int
    batches: str
    schedule: Mapping[str, int]
    max_samples: int
    max_seconds: float
    shape_file: str = "shape_info.pt"
    dtype: str = "float32"
    sort_utterance: bool = False
    subsampling: int = workloads.DEFAULTS["subsampling"]
    token_scale: float = workloads.DEFAULTS["token_scale"]
    concatenate: int = workloads.DEFAULTS["concatenate"]
    frames: Optional[int] = workloads.DEFAULTS["frames"]
    tokens: Optional[int] = workloads.DEFAULTS["tokens"]
    logits: str = workloads.DEFAULTS["logits"]
    margin: float = workloads.DEFAULTS["margin"]
    vocab_size: int = 500
    encoder_dim: int = 512
    passes: Tuple[str, ...] = PASSES
    scopes: Tuple[str, ...] = SCOPES
    rounds: int = 5
    threads: Optional[int] = None
    seed: int = 20220227
    denormals: str = "flush"
    pruned_recipe: str = "icefall"
    prune_range: int = 5
    spread: float = 0.02
    record_shapes: bool = True
    with_stack: bool = True
    profile_memory: bool = True
    gzip_traces: str = "auto"
    memory_snapshot: bool = False
    find_largest: Optional[str] = None
    memory_limit: Optional[str] = None
    largest_cap: Optional[int] = None
    allocator: str = "reuse"
    tf32: bool = False
    l2: str = "cold"
    amp: Optional[str] = None
    compile: bool = False
    min_duration: Optional[float] = workloads.DEFAULTS["min_duration"]
    max_duration: Optional[float] = workloads.DEFAULTS["max_duration"]

    @property
    def precision(self) -> str:
        """The dtype that the joiner's products, and so the logits, are rounded to."""
        return self.amp or self.dtype

    @property
    def suffix(self) -> str:
        """The part of the log folder's name that tells the batches: "30", "max-frames-10000", "largest-batch-size"."""
        if self.find_largest:
            return f"largest-{self.find_largest}"
        return f"max-frames-{self.max_frames}" if self.sort_utterance else str(self.batch_size)

    @property
    def own_batches(self) -> bool:
        """Whether each timing round measures batches that no other round has; else all rounds have the same."""
        return self.batches in ("random", "spread") and not self.find_largest

    @property
    def trace_steps(self) -> int:
        """Steps of the trace pass: every one is followed by ``prof.step()``, none is left over."""
        schedule = self.schedule
        return (schedule["wait"] + schedule["warmup"] + schedule["active"]) * schedule["repeat"]

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        return cls(**{**OLDER, **values, "passes": tuple(values["passes"]), "scopes": tuple(values["scopes"])})


#: Of runs that are older than these settings.
OLDER = {"allocator": "system", "l2": "warm"}
DEFAULTS: Dict[str, Any] = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}


def preset_parts(text: str) -> Tuple[Optional[str], str]:
    """(size preset or None, workload) of "cpu", "chars", "cpu,chars" or "chars,cpu".  Raises UserError for others."""
    words = [word.strip() for word in text.split(",")]
    sizes = [word for word in words if word in PRESETS]
    kinds = [word for word in words if word in workloads.WORKLOADS]
    if len(sizes) > 1 or len(kinds) > 1 or len(sizes) + len(kinds) != len(words):
        raise UserError(
            f"give a size ({', '.join(PRESETS)}), a workload ({', '.join(workloads.WORKLOADS)}), or both "
            f"(cpu,chars), not {text!r}"
        )
    return (sizes[0] if sizes else None), (kinds[0] if kinds else workloads.DEFAULT)


def preset_note(preset: str) -> str:
    """What the preset of resolved settings is, for people."""
    size, workload = preset_parts(preset)
    notes = [PRESET_NOTES[size]] if size else []
    return "; ".join(notes + ([] if workload == workloads.DEFAULT else [workloads.NOTES[workload]]))


def with_correctness(passes: Sequence[str]) -> Tuple[str, ...]:
    """The passes in their order; correctness is always among them: no time without it."""
    return tuple(name for name in PASSES if name == "correctness" or name in passes)


def resolve(given: Mapping[str, Any], device: str) -> Settings:
    """Settings from the flags that were `given` (absent or None: not given), the workload, the size preset and the
    defaults, in this order.  `device` is "cpu", "cuda" or "cuda:N", already found; the size is "seed" on CUDA and "cpu"
    on a CPU unless given.  file_vocab_size: of the shape file, for a size preset that does not say another.  Raises
    UserError for a setting that this device has no use for."""
    size, workload = preset_parts(given.get("preset") or workloads.DEFAULT)
    size = size or ("cpu" if device == "cpu" else "seed")
    values = {**DEFAULTS, **PRESETS[size]}
    if given.get("file_vocab_size") and "vocab_size" not in PRESETS[size]:
        values["vocab_size"] = given["file_vocab_size"]
    own = workloads.WORKLOADS[workload]
    values.update({key: value[size] if isinstance(value, dict) else value for key, value in own.items()})
    values.update({key: value for key, value in given.items() if value is not None})
    if size == "quick" and values["pruned_recipe"] == "benchmark-2022" and given.get("encoder_dim") is None:
        values["encoder_dim"] = max(values["encoder_dim"], values["vocab_size"])  # whose scores are encoder outputs
    if values["find_largest"]:
        values.update(_of_a_search(given))
    elif values["memory_limit"] or values["largest_cap"]:
        flag = "--memory-limit" if values["memory_limit"] else "--largest-cap"
        raise UserError(f"{flag}: belongs to --find-largest batch-size or max-frames; give that too, or leave it out")
    values.update(device=device, preset=size if workload == workloads.DEFAULT else f"{size},{workload}")
    values["passes"] = with_correctness(values["passes"])
    if values.get("batches") is None:
        values["batches"] = "spread" if values["sort_utterance"] else "first" if values["find_largest"] else "random"
    if values["logits"] == "random" and given.get("margin") is not None:
        raise UserError(f"--margin {given['margin']:g}: is of --logits peaky; give both or none")
    if values["logits"] == "peaky" and values["pruned_recipe"] == "benchmark-2022":
        raise UserError(
            "--logits peaky: --pruned-recipe benchmark-2022 takes encoder outputs for scores; peaky ones are none; "
            "leave out one of them"
        )
    if values["tf32"] and device == "cpu":
        raise UserError("--tf32 true: is of CUDA, and this run is on the CPU; leave the flag out")
    if given.get("l2") and device == "cpu":
        raise UserError(f"--l2 {given['l2']}: is of CUDA, and this run is on the CPU; leave the flag out")
    if values["memory_snapshot"] and device == "cpu":
        raise UserError("--memory-snapshot true: is of CUDA memory, and this run is on the CPU; leave the flag out")
    return Settings.from_json(values)


def _of_a_search(given: Mapping[str, Any]) -> Dict[str, Any]:
    """What --find-largest settles: order of the utterances, passes, and the one scope whose step must fit."""
    kind = given["find_largest"]
    if given.get("passes"):
        raise UserError("--passes: --find-largest has passes of its own; leave one of the two out")
    if given.get("sort_utterance") not in (None, FIND_LARGEST[kind]):
        wanted = "true" if FIND_LARGEST[kind] else "false"
        raise UserError(f"--find-largest {kind}: is of batches with --sort-utterance {wanted}; leave that flag out")
    scopes = given.get("scopes") or ("step",)
    if len(scopes) != 1:
        raise UserError(f"--find-largest {kind}: takes one scope; give --scope step (the default) or --scope loss")
    return {
        "sort_utterance": FIND_LARGEST[kind],
        "passes": ("correctness",),
        "scopes": tuple(scopes),
        "num_batches": given.get("num_batches") or LARGEST_NUM_BATCHES,
        "rounds": given.get("rounds") or LARGEST_ROUNDS,
        "l2": given.get("l2") or "warm",  # the buffer that empties the cache would take from the memory
    }

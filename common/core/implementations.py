"""Hold the table of implementations, one line each, and import the scripts that hold their
adapters.

Adding one = one losses/benchmark_<x>.py and a line.  A copy of benchmark_mine.py, wherever it is,
is an implementation of its own.  No torch and no loss is imported here, unless a user's script does
at its top.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rnnt_bench.core.errors import NotRunnable, UserError
from rnnt_bench.core.files import ROOT, not_a_file

#: Lattices other than that of Graves 2012, in words; rnnt_bench.losses.topologies has their arcs.
LATTICES = {
    "modified": "one symbol a frame",
    "modified-last-blank": "one symbol a frame, the last a blank",
    "constrained": "one target a frame, with its blank",
    "tdt": "tokens and durations",
    "multi-blank": "blanks of several frames",
    "hat": "blank by a sigmoid",
    "delay-penalty": "late targets cost more",
    "windowed": "each target within a window of frames",
}
#: The frames of the columns that the joiner of a lattice has behind the V symbols, as papers use
#: them.
DURATIONS = {"tdt": (0, 1, 2, 3, 4), "multi-blank": (2, 4, 8)}
#: The lattices in which a frame has at most one symbol, so that a path meets fewer cells.
ONE_SYMBOL = ("modified", "modified-last-blank", "constrained")
#: The lattices that fused_transducer takes: a new one has no such row before the package has it.
OF_FUSED = (
    "modified",
    "modified-last-blank",
    "constrained",
    "tdt",
    "multi-blank",
    "hat",
    "delay-penalty",
    "windowed",
)
#: A variant of every exact loss that takes logits, and its kind: given the logits of an utterance
#: at a time it needs less memory and more time (rnnt_bench.losses.layouts.ByUtterance).
BY_UTTERANCE = "by-utterance"
#: Kinds of losses, in the order of the tables; losses of different kinds are never ranked against
#: each other.
KINDS = ("exact", BY_UTTERANCE, *LATTICES, "pruned")
#: Conditions of controls, which tell what a ratio is made of (Implementation.controls): another
#: torch than most losses have; torch's matrix products at the processor's rate, by a preloaded
#: library that makes MKL take the path that it takes on Intel's processors. The second is a word
#: behind @, beside the names of environments.
OTHER_TORCH, FAST_MKL = "other torch", "fast-mkl"
#: The kind of a loss by the layout that it takes (losses.layouts); on another lattice that of an
#: exact one is its name.
LAYOUTS = {"padded": "exact", "packed": "exact", "joint": "exact", "pruned": "pruned"}


def durations_of(kind: str, chosen: str | None = None) -> tuple[int, ...]:
    """Return the frames of the columns behind the V symbols of a kind of loss.  chosen: as
    --durations has them."""
    usual = DURATIONS.get(kind, ())
    return tuple(map(int, chosen.split(","))) if usual and chosen is not None else usual


@dataclass(frozen=True)
class Implementation:
    """Describe one loss of the table.

    Args:
        script: the module that holds its ADAPTER, or the path of such a file.
        built: whether the suite can build the package from source where it is not installed.
        variants: other ways to call it, each with its kind; the adapter has what they set.  An
            exact loss that takes logits has BY_UTTERANCE beside.
        takes_logits: whether it takes logits, which can be made an utterance at a time.
        by_utterance: whether the default run measures that variant too.
        template: whether benchmark_all.py leaves it out unless it is named.
        controls: conditions under which the default run measures it too, where the machine or
            another loss of its kind gives cause.
        condition: what is behind the @ of its name: an environment that is not its own, or
          FAST_MKL."""

    name: str
    script: str
    environment: str
    package: str
    built: bool = False
    kind: str = "exact"
    variants: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    takes_logits: bool = True
    by_utterance: bool = False
    template: bool = False
    controls: tuple[str, ...] = ()
    condition: str = ""

    @property
    def exact(self) -> bool:
        return self.kind in ("exact", BY_UTTERANCE)

    @property
    def file(self) -> str:
        """Return the path of its script, relative to the checkout: "losses/benchmark_nemo.py"."""
        return self.script if self.script.endswith(".py") else self.script.replace(".", "/") + ".py"

    @property
    def folder(self) -> str:
        """Return its part of the name of a log folder: "fast_rnnt-modified-at-k2" for
        "fast_rnnt:modified@k2"."""
        return self.name.replace(":", "-").replace("@", "-at-")

    def of_variant(self, variant: str) -> Implementation:
        """Return one of its variants as an implementation: "k2:modified".  Raises UserError."""
        kinds = dict(self.variants)
        if self.kind == "exact" and self.takes_logits and not (self.variant or self.placed):
            kinds[BY_UTTERANCE] = BY_UTTERANCE
        if variant not in kinds:
            raise UserError(
                f"{self.name} has no variant {variant!r}; its variants: {', '.join(kinds) or 'none'}"
            )
        named = replace(
            self, name=f"{self.name}:{variant}", kind=kinds[variant], variants={}, variant=variant
        )
        # By utterance it is measured for its memory, which no control changes.
        return replace(named, controls=()) if variant == BY_UTTERANCE else named

    @property
    def placed(self) -> bool:
        """Tell whether it is to run in an environment that is not its own."""
        return self.condition not in ("", FAST_MKL)

    @property
    def same_as(self) -> str:
        """Return the name of the row whose code this one is, under another condition or an
        utterance at a time.

        "" for a row of its own, such as one of an environment that may have another version of the
        package."""
        whole = self.name.partition("@")[0].removesuffix(f":{BY_UTTERANCE}")
        is_other = self.placed and OTHER_TORCH not in self.controls
        return "" if whole == self.name or is_other else whole

    def under(self, condition: str) -> Implementation:
        """Return the implementation under the torch of another environment, "fast_rnnt@k2", or
        under FAST_MKL, as "fused@fast-mkl".  Raises UserError."""
        conditions = (*environments(), FAST_MKL)
        if condition not in conditions:
            raise UserError(
                f"{self.name}@{condition}: no such environment; there are {', '.join(conditions)}"
            )
        if condition == self.environment:
            return self
        environment = self.environment if condition == FAST_MKL else condition
        name = f"{self.name}@{condition}"
        return replace(self, name=name, environment=environment, variants={}, condition=condition)


#: Variants of the full losses of k2 and of fast_rnnt, from which k2's was made.
K2_VARIANTS = {name: name for name in ("modified", "constrained", "delay-penalty", "hat")}

HAT = {"hat": "hat"}

IMPLEMENTATIONS = (
    Implementation(
        "torchaudio",
        "benchmark_torchaudio",
        "main",
        "torchaudio",
        variants={"log-probs": "exact", **HAT, "windowed": "windowed"},
        by_utterance=True,
    ),
    Implementation(
        "optimized_transducer",
        "benchmark_ot",
        "main",
        "optimized_transducer",
        built=True,
        variants={
            "log-probs": "exact",
            "modified": "modified-last-blank",
            "hat": "hat",
            "cuda": "exact",
            "cuda-modified": "modified-last-blank",
        },
        by_utterance=True,
        controls=(FAST_MKL,),
    ),
    Implementation(
        "fast_rnnt",
        "losses.benchmark_fast_rnnt",
        "main",
        "fast_rnnt",
        built=True,
        variants={**K2_VARIANTS, "cuda": "exact", "cuda-modified": "modified"},
        controls=(OTHER_TORCH, FAST_MKL),
    ),
    Implementation("k2", "benchmark_k2", "k2", "k2", variants=K2_VARIANTS),
    Implementation("warprnnt_numba", "losses.benchmark_warprnnt_numba", "main", "warprnnt_numba"),
    Implementation("nemo", "losses.benchmark_nemo", "nemo", "nemo", variants=HAT),
    Implementation("nemo-triton", "losses.benchmark_nemo_triton", "nemo", "nemo"),
    Implementation(
        "nemo-tdt",
        "losses.benchmark_nemo_tdt",
        "nemo",
        "nemo",
        kind="tdt",
        variants={"pytorch": "tdt"},
    ),
    Implementation(
        "nemo-multi-blank",
        "losses.benchmark_nemo_multi_blank",
        "nemo",
        "nemo",
        kind="multi-blank",
        variants={"pytorch": "multi-blank"},
    ),
    Implementation(
        "warp-rnnt",
        "losses.benchmark_warp_rnnt",
        "main",
        "warp_rnnt",
        built=True,
        variants={"gather": "exact", "compact": "exact", "hat": "hat"},
    ),
    Implementation(
        "warp-transducer",
        "losses.benchmark_warp_transducer",
        "main",
        "warprnnt_pytorch",
        variants=HAT,
    ),
    Implementation(
        "speechbrain", "losses.benchmark_speechbrain", "main", "speechbrain", variants=HAT
    ),
    Implementation("apex", "losses.benchmark_apex", "main", "apex", variants={"packed": "exact"}),
    Implementation(
        "fused",
        "benchmark_fused",
        "main",
        "fused_transducer",
        variants={"all-cells": "exact", "torch": "exact", **{name: name for name in OF_FUSED}},
        takes_logits=False,
        controls=(FAST_MKL,),
    ),
    Implementation(
        "reference",
        "losses.benchmark_reference",
        "main",
        "torch",
        variants={name: name for name in LATTICES},
        controls=(OTHER_TORCH,),
    ),
    Implementation(
        "transformers",
        "losses.benchmark_transformers",
        "main",
        "transformers",
        kind="tdt",
        variants={"kernel": "tdt"},
    ),
    Implementation("mine", "benchmark_mine", "main", "torch", template=True),
    Implementation(
        "fast_rnnt-pruned",
        "losses.benchmark_fast_rnnt_pruned",
        "main",
        "fast_rnnt",
        built=True,
        kind="pruned",
        controls=(OTHER_TORCH,),
    ),
    Implementation(
        "k2-pruned", "benchmark_k2_pruned", "k2", "k2", kind="pruned", variants={"hat": "pruned"}
    ),
)

#: The implementations of the table, and those that are loaded from other files.
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


def find(name: str) -> Implementation:
    """Return the implementation of NAME, NAME:VARIANT, either with @CONDITION behind it.  Raises
    UserError."""
    row, at, condition = name.partition("@")
    base, _, variant = row.partition(":")
    if base not in BY_NAME:
        raise UserError(f"no implementation is named {base!r}; there are {', '.join(BY_NAME)}")
    implementation = BY_NAME[base].of_variant(variant) if variant else BY_NAME[base]
    return implementation.under(condition) if at else implementation


def environments() -> tuple[str, ...]:
    """Return the environments that hold an implementation."""
    return tuple(dict.fromkeys(implementation.environment for implementation in IMPLEMENTATIONS))


def with_variants() -> list[Implementation]:
    """Return every implementation, each followed by its variants but BY_UTTERANCE."""
    rows: list[Implementation] = []
    for implementation in BY_NAME.values():
        rows += [implementation, *map(implementation.of_variant, implementation.variants)]
    return rows


@dataclass(frozen=True)
class Attributes:
    """Hold the attributes of the class ADAPTER of a script, with their defaults."""

    name: Any = ""  # a text, if the script is right
    hint: str = ""
    layout: str = "padded"
    topology: str = "regular"
    # {name: {attribute: value}}, if the script is right
    variants: Any = field(default_factory=dict)
    simulator: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "cuda")
    python_loops: Sequence[str] = ()

    def of_variant(self, variant: str) -> Attributes:
        """Return the attributes of a variant; "" for the script itself."""
        changed = self.variants.get(variant, {})
        return replace(self, **{key: value for key, value in changed.items() if key in vars(self)})

    def kind(self, name: str) -> str:
        """Return one of KINDS, of the whole batch.  Raises UserError, which names the
        implementation `name`, for an unknown layout."""
        if self.layout not in LAYOUTS:
            raise UserError(
                f"{name}: layout = {self.layout!r} is none; choose one of {', '.join(LAYOUTS)}"
            )
        kind = LAYOUTS[self.layout]
        return str(self.topology) if kind == "exact" and self.topology != "regular" else kind


def load(script: str) -> Any:
    """Return the ADAPTER of a script (Implementation.script); that of a file is in the table of
    this process from then.

    Raises what importing it raises, NotRunnable for a module that it lacks, UserError for a file
    that is no row."""
    if not script.endswith(".py"):
        if str(ROOT) not in sys.path:  # a script of losses/, or an installed command, was started
            sys.path.append(str(ROOT))
        return importlib.import_module(script).ADAPTER
    try:
        adapter = imported(Path(script)).ADAPTER
    except ModuleNotFoundError as error:
        raise NotRunnable(
            "missing", f"{script} needs {error.name}, which {sys.executable} does not have"
        ) from error
    adapter.name = _row(Path(script), _attributes(adapter)).name
    return adapter


def of_file(file: str) -> Implementation:
    """Return the implementation that the script `file` measures: its line of the table, or else a
    row of its own.

    Raises UserError for a file that cannot be read, holds no adapter, or takes another script's
    name."""
    path = Path(os.path.abspath(file))
    for implementation in BY_NAME.values():
        if file_of(implementation) == Path(os.path.realpath(path)):
            return implementation
    if problem := not_a_file(path):
        raise UserError(f"{file}: {problem}; give a copy of benchmark_mine.py")
    return _row(path, _attributes_of_file(path))


def described(implementation: Implementation) -> Attributes:
    """Return the attributes of its ADAPTER; the defaults where its script cannot be imported
    here."""
    if implementation.script.endswith(".py"):
        return _attributes_of_file(Path(implementation.script))
    return _attributes(load(implementation.script))


@cache
def _attributes_of_file(path: Path) -> Attributes:
    """Return the attributes of the ADAPTER in a file; the defaults where it cannot be imported: its
    row says why.

    Raises UserError for a file that is no Python or holds no ADAPTER."""
    search = list(sys.path)
    try:
        with redirect_stdout(sys.stderr):
            adapter = getattr(imported(path), "ADAPTER", None)
    except SyntaxError as error:
        raise UserError(
            f"{error.filename or path}, line {error.lineno}: not Python ({error.msg})"
        ) from error
    except (Exception, SystemExit):
        return Attributes()
    finally:
        sys.path[:] = search
    if adapter is None:
        raise UserError(f"{path}: holds no ADAPTER; start from a copy of benchmark_mine.py")
    return _attributes(adapter)


def _attributes(adapter: Any) -> Attributes:
    """Return the attributes of an adapter, with defaults for those that it lacks."""
    return Attributes(
        **{key: getattr(adapter, key, default) for key, default in vars(Attributes()).items()}
    )


def _row(path: Path, attributes: Attributes) -> Implementation:
    """Return the row of a file whose adapter has these attributes, and add it to the table of this
    process.

    Its name is the adapter's; where that says none or still the template's, the file's:
    benchmark_flash.py is "flash". Raises UserError for a name that belongs to another script, or
    would not do in a flag or as a folder."""
    variants = attributes.variants
    if not isinstance(variants, Mapping) or not all(
        isinstance(changed, Mapping) for changed in variants.values()
    ):
        raise UserError(f"{path}: variants = {variants!r}: give {{name: {{attribute: value}}}}")
    name = attributes.name
    if not name or any(row.template and row.name == name for row in IMPLEMENTATIONS):
        name = path.stem.removeprefix("benchmark_")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(
            f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'"
        )
    owner = BY_NAME.get(name)
    if owner is not None and file_of(owner) != Path(os.path.realpath(path)):
        raise UserError(
            f"{path}: its name {name!r} is that of {file_of(owner)}; give it a name of its own"
        )
    BY_NAME[name] = Implementation(
        name,
        str(path),
        "main",
        "torch",
        kind=attributes.kind(name),
        variants={variant: attributes.of_variant(variant).kind(name) for variant in variants},
        takes_logits=attributes.layout in ("padded", "packed"),
        template=True,
    )
    return BY_NAME[name]


def file_of(implementation: Implementation) -> Path:
    """Return the file that holds its ADAPTER."""
    return Path(os.path.realpath(ROOT / implementation.file))


def imported(path: Path) -> ModuleType:
    """Import a file as Python does a script, with what lies beside it, so that `inspect` finds its
    source."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    here = os.getcwd()
    try:
        spec.loader.exec_module(module)
    finally:
        os.chdir(here)
    return module

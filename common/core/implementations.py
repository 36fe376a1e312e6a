"""Hold the table of implementations, and import the scripts that hold their adapters.

An implementation is a loss as one package has it.  To add one, write losses/benchmark_<name>.py,
with a class ADAPTER, and a row of IMPLEMENTATIONS.  A copy of benchmark_mine.py in any folder needs
no row.  Torch and the losses are not imported here, unless a user's script does so at its top.
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

#: Lattices other than that of Graves 2012 -> their description.  Their arcs are in
#: rnnt_bench.losses.topologies.
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
#: Lattice -> the durations in frames, as its paper has them.  The joiner has a column for each,
#: behind those of the V symbols.
DURATIONS = {"tdt": (0, 1, 2, 3, 4), "multi-blank": (2, 4, 8)}
#: Lattices in which a frame has at most one symbol.
ONE_SYMBOL = ("modified", "modified-last-blank", "constrained")
#: The lattices that fused_transducer takes.  It is a list of its own: what is new in LATTICES is not
#: in that package yet.
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
#: Name and kind of a variant of every exact loss that takes logits.  It gets the logits of one
#: utterance at a time (losses.layouts.ByUtterance), which takes less memory and more time.
BY_UTTERANCE = "by-utterance"
#: Kinds of losses, in the order of the tables.  Losses of different kinds are not ranked together.
KINDS = ("exact", BY_UTTERANCE, *LATTICES, "pruned")
#: Conditions under which a loss is measured once more (Implementation.controls), to tell how much
#: of a ratio comes from the condition.  OTHER_TORCH: in an environment with another torch, such as
#: "fast_rnnt@k2".
OTHER_TORCH = "other torch"
#: With a preloaded library that makes MKL use its fast path for Intel's processors on any
#: processor, such as "fused@fast-mkl".
FAST_MKL = "fast-mkl"
#: Layout of the logits that a loss takes (losses.layouts) -> its kind.  An "exact" one on another
#: lattice has the name of that lattice as its kind.
LAYOUTS = {"padded": "exact", "packed": "exact", "joint": "exact", "pruned": "pruned"}


def durations_of(kind: str, chosen: str | None = None) -> tuple[int, ...]:
    """Return the durations in frames that the joiner of a kind of loss has columns for.

    chosen: the text of --durations, "0,1,2"; None for those of DURATIONS.  A kind without durations
    has none either way."""
    usual = DURATIONS.get(kind, ())
    if not usual or chosen is None:
        return usual
    return tuple(map(int, chosen.split(",")))


@dataclass(frozen=True)
class Implementation:
    """Describe one row of the table: a loss, a variant of it, or either under a condition.

    Args:
        name: "k2", "k2:modified" for a variant, "fast_rnnt@k2" under a condition.
        script: the module that holds its ADAPTER, or the path of such a file.
        environment: the environment of `make setup` that it runs in.
        package: the Python package that has the loss.
        built: whether the suite can build the package from source where it is not installed.
        kind: one of KINDS.
        variants: name -> kind of other ways to call it; ADAPTER.variants has what they set.  An
            exact loss that takes logits has the variant BY_UTTERANCE too.
        variant: the variant that this row is; "" for none.
        takes_logits: whether it takes logits; else it takes encoder and decoder outputs.
        by_utterance: whether a run without --only measures its variant BY_UTTERANCE too.
        template: whether a run measures it only if it is named.
        controls: conditions under which a run without --only measures it too, if they make a
            difference here (setup.interpreters.controls).
        condition: the text behind the @ of its name, which is FAST_MKL or an environment that is
            not its own; "" for none."""

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
        """Tell whether it computes the loss of Graves 2012 without pruning, from logits or outputs
        of any layout in LAYOUTS."""
        return self.kind in ("exact", BY_UTTERANCE)

    @property
    def file(self) -> str:
        """Return the path of its script, relative to the checkout: "losses/benchmark_nemo.py"."""
        return self.script if self.script.endswith(".py") else self.script.replace(".", "/") + ".py"

    @property
    def folder(self) -> str:
        """Return its name as it stands in the name of a log folder: "fast_rnnt-modified-at-k2"."""
        return self.name.replace(":", "-").replace("@", "-at-")

    def of_variant(self, variant: str) -> Implementation:
        """Return the row of a variant of this row, such as "k2:modified".

        Raises UserError if this row has no such variant."""
        kinds = dict(self.variants)
        if self.kind == "exact" and self.takes_logits and not self.variant:
            kinds[BY_UTTERANCE] = BY_UTTERANCE
        if variant not in kinds:
            raise UserError(
                f"{self.name} has no variant {variant!r}; its variants: {', '.join(kinds) or 'none'}"
            )
        # BY_UTTERANCE is measured for its memory, which no condition changes.
        controls = () if variant == BY_UTTERANCE else self.controls
        return replace(
            self,
            name=f"{self.name}:{variant}",
            kind=kinds[variant],
            variants={},
            variant=variant,
            controls=controls,
        )

    @property
    def in_other_environment(self) -> bool:
        """Tell whether it runs in an environment that is not its own, as "fast_rnnt@k2" does."""
        return self.condition not in ("", FAST_MKL)

    @property
    def same_as(self) -> str:
        """Return the name of the row that runs the same code; "" where there is none.

        "fused" is that of "fused@fast-mkl" and "k2" that of "k2:by-utterance".  A row in another
        environment has one only if OTHER_TORCH is a control of the loss: else the environment may
        have another version of its package."""
        base = self.name.partition("@")[0].removesuffix(f":{BY_UTTERANCE}")
        may_differ = self.in_other_environment and OTHER_TORCH not in self.controls
        return "" if base == self.name or may_differ else base

    def under(self, condition: str) -> Implementation:
        """Return the row that measures this one under a condition, such as "k2@fast-mkl" for "k2".

        Its own environment is no condition: for that, return this row itself.  Raises UserError for
        an unknown condition.

        condition: FAST_MKL, or the name of an environment to run in."""
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


#: Variants of the unpruned loss of k2 and of fast_rnnt, from which k2's was made.
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

#: Name -> implementation, of the table and of the files that this process has loaded.
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


def find(name: str) -> Implementation:
    """Return the implementation of a name: of "k2", "k2:modified", "fast_rnnt@k2" or
    "fast_rnnt:modified@k2".

    Raises UserError for an unknown name, or one with an unknown variant or condition."""
    row, at, condition = name.partition("@")
    base, _, variant = row.partition(":")
    if base not in BY_NAME:
        raise UserError(f"no implementation is named {base!r}; there are {', '.join(BY_NAME)}")
    implementation = BY_NAME[base].of_variant(variant) if variant else BY_NAME[base]
    return implementation.under(condition) if at else implementation


def environments() -> tuple[str, ...]:
    """Return the names of the environments that have an implementation."""
    return tuple(dict.fromkeys(implementation.environment for implementation in IMPLEMENTATIONS))


def with_variants() -> list[Implementation]:
    """Return every implementation, each followed by its variants other than BY_UTTERANCE."""
    # `variants` never has BY_UTTERANCE: `of_variant` makes that of an exact loss of logits.
    rows: list[Implementation] = []
    for implementation in BY_NAME.values():
        rows += [implementation, *map(implementation.of_variant, implementation.variants)]
    return rows


@dataclass(frozen=True)
class Attributes:
    """Hold those attributes of a script's ADAPTER that are read without its loss, with defaults.

    losses.adapter.Adapter says what they mean.  They may be a user's, so `_add_row` checks `name`
    and `variants`."""

    name: Any = ""  # str
    hint: str = ""
    layout: str = "padded"
    topology: str = "regular"
    variants: Any = field(default_factory=dict)  # {name: {attribute: value}}
    simulator: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[str] = ("cpu", "cuda")
    python_loops: Sequence[str] = ()

    def of_variant(self, variant: str) -> Attributes:
        """Return the attributes of a variant; for "" those of the script itself.

        What a variant sets beside these attributes is left out."""
        changed = self.variants.get(variant, {})
        return replace(self, **{key: value for key, value in changed.items() if key in vars(self)})

    def kind(self, name: str) -> str:
        """Return the kind of the loss, one of KINDS: that of its layout.  But an exact loss of another
        lattice than the regular one has the name of its lattice.

        Raises UserError for an unknown layout.  name: the implementation, for that message."""
        if self.layout not in LAYOUTS:
            raise UserError(
                f"{name}: layout = {self.layout!r} is no layout; choose one of {', '.join(LAYOUTS)}"
            )
        kind = LAYOUTS[self.layout]
        if kind == "exact" and self.topology != "regular":
            return str(self.topology)
        return kind


def load(script: str) -> Any:
    """Return the class ADAPTER of a script, which is imported.

    A script that is a file gets a row in the table of this process, and its ADAPTER the name of
    that row.  Raises NotRunnable for a file that imports a missing module, UserError for a file
    that cannot be a row, and any other error that the import raises.

    script: as in Implementation, a module or the path of a file."""
    if not script.endswith(".py"):
        # ROOT is there already unless a script of losses/ or an installed command was started.
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        return importlib.import_module(script).ADAPTER
    try:
        adapter = imported(Path(script)).ADAPTER
    except ModuleNotFoundError as error:
        raise NotRunnable(
            "missing", f"{script} needs {error.name}, which {sys.executable} does not have"
        ) from error
    adapter.name = _add_row(Path(script), _attributes(adapter)).name
    return adapter


def of_file(file: str) -> Implementation:
    """Return the row of the script at the path `file`; add a row if the script has none.

    Raises UserError for a file that cannot be read, has no ADAPTER, or has the name of another
    script."""
    # A new row has the path with its links, since the row may be named after the file.
    path = Path(os.path.abspath(file))
    without_links = Path(os.path.realpath(path))
    for implementation in BY_NAME.values():
        if file_of(implementation) == without_links:
            return implementation
    if problem := not_a_file(path):
        raise UserError(f"{file}: {problem}; give a copy of benchmark_mine.py")
    return _add_row(path, _attributes_of_file(path))


def attributes_of(implementation: Implementation) -> Attributes:
    """Return the attributes of an implementation's ADAPTER; the defaults where a user's file cannot
    be imported.

    Raises UserError for a user's file that is no Python or has no ADAPTER."""
    if implementation.script.endswith(".py"):
        return _attributes_of_file(Path(implementation.script))
    return _attributes(load(implementation.script))


@cache
def _attributes_of_file(path: Path) -> Attributes:
    """Return the attributes of the ADAPTER in a file.

    Returns the defaults where the import fails: the row of the loss shows why when it is measured.
    Raises UserError for a file that is no Python or has no ADAPTER."""
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
    """Return the attributes of the class `adapter`, with defaults for those that it lacks."""
    return Attributes(
        **{key: getattr(adapter, key, default) for key, default in vars(Attributes()).items()}
    )


def _add_row(path: Path, attributes: Attributes) -> Implementation:
    """Add the row of a file, whose ADAPTER has these attributes, to BY_NAME, and return it.

    Raises UserError for wrong variants, and for a name that `_name` refuses."""
    variants = attributes.variants
    if not isinstance(variants, Mapping) or not all(
        isinstance(changed, Mapping) for changed in variants.values()
    ):
        raise UserError(f"{path}: variants = {variants!r}: give {{name: {{attribute: value}}}}")
    name = _name(path, attributes.name)
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


def _name(path: Path, name: Any) -> str:
    """Return the name of the row that a user's file gets.

    It is `name`, which the file's ADAPTER has.  If that is empty, or still the template's, the row
    is named after the file: "flash" for benchmark_flash.py.  Raises UserError for the name of
    another script, and for a name with letters that flags or folders could not have."""
    if not name or any(row.template and row.name == name for row in IMPLEMENTATIONS):
        name = path.stem.removeprefix("benchmark_")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):  # "fast_rnnt-2.0"
        raise UserError(
            f"{path}: its name is {name!r}; give it one of letters, digits, '_', '.' and '-'"
        )
    owner = BY_NAME.get(name)
    if owner is not None and file_of(owner) != Path(os.path.realpath(path)):
        raise UserError(
            f"{path}: its name {name!r} is that of {file_of(owner)}; give it a name of its own"
        )
    return name


def file_of(implementation: Implementation) -> Path:
    """Return the absolute path of the file that holds its ADAPTER, without links."""
    return Path(os.path.realpath(ROOT / implementation.file))


def imported(path: Path) -> ModuleType:
    """Import a file as a module named after it, and return the module.

    Its folder goes to the front of sys.path: like a script it may import what is there.  The module
    goes into sys.modules, where `inspect` needs it to find the source."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    current_folder = os.getcwd()
    try:
        spec.loader.exec_module(module)
    finally:
        os.chdir(current_folder)  # a user's file may change it
    return module

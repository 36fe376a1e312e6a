"""The table of implementations: one line each, read by every script.  Adding one = one losses/benchmark_<x>.py and a
line.

No import of torch or of any loss here: the parent process and the summarizer read this too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import List, Mapping, Optional, Tuple

from common.core.errors import UserError

#: Lattices other than that of Graves 2012, in words; common.losses.topologies has their arcs.
LATTICES = {
    "modified": "one symbol a frame",
    "modified-last-blank": "one symbol a frame, the last a blank",
    "constrained": "one target a frame, with its blank",
    "tdt": "tokens and durations",
    "multi-blank": "blanks of several frames",
    "hat": "blank by a sigmoid",
    "star": "frames may be skipped",
    "delay-penalty": "late targets cost more",
}
#: Lattice -> frames of the columns that its joiner has behind the V symbols, as papers use them: durations of a token,
#: and longer blanks.
DURATIONS = {"tdt": (0, 1, 2, 3, 4), "multi-blank": (2, 4, 8)}
#: The lattices in which a frame has at most one symbol, so that a path meets fewer cells.
ONE_SYMBOL = ("modified", "modified-last-blank", "constrained")
#: Kinds of losses, in the order of the tables; losses of different kinds are never ranked against each other.
#: exact: the transducer loss of Graves 2012; one of LATTICES: exact, on that lattice; pruned: approximates by design.
KINDS = ("exact", *LATTICES, "pruned")
#: Layout that a loss takes (see common.losses.layouts) -> the kind of that loss.  The kind of an exact one on another
#: lattice is the name of the lattice.
LAYOUTS = {"padded": "exact", "packed": "exact", "joint": "exact", "pruned": "pruned"}


def durations_of(kind: str, given: Optional[str] = None) -> Tuple[int, ...]:
    """Return the frames of the columns behind the V symbols of a kind of loss.

    given: as --durations has them ("0,1,2"); None: those of DURATIONS.
    """
    usual = DURATIONS.get(kind, ())
    return tuple(map(int, given.split(","))) if usual and given is not None else usual


@dataclass(frozen=True)
class Implementation:
    """One loss of the table.

    Args:
        name: as in tables and log folders.
        script: the module that holds its ADAPTER, or the path of such a file (common.core.scripts).
        environment: the key of common.setup.environments.ENVIRONMENTS that has it.
        package: the package that it calls.
        built: whether the suite can build the package from source where it is not installed.
        kind: one of KINDS.
        variants: other ways to call it, each with its kind; the adapter has what they set.
        variant: the way that this one is called; "" for the first.
        template: whether benchmark_all.py leaves it out unless it is named.
        control: whether it runs under any torch; the default run then measures it in other environments too that have
            losses of its kind.
        placed: whether the environment was named and is not its own."""

    name: str
    script: str
    environment: str
    package: str
    built: bool = False
    kind: str = "exact"
    variants: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    template: bool = False
    control: bool = False
    placed: bool = False

    @property
    def exact(self) -> bool:
        return self.kind == "exact"

    @property
    def file(self) -> str:
        """Return the path of its script, relative to the checkout: "losses/benchmark_nemo.py"."""
        return self.script if self.script.endswith(".py") else self.script.replace(".", "/") + ".py"

    @property
    def folder(self) -> str:
        """Return its part of the name of a log folder: "fast_rnnt-modified-at-k2" for "fast_rnnt:modified@k2"."""
        return self.name.replace(":", "-").replace("@", "-at-")

    def of_variant(self, variant: str) -> Implementation:
        """Return one of its variants as an implementation: "k2:modified".  Raises UserError."""
        if variant not in self.variants:
            known = ", ".join(self.variants) or "none"
            raise UserError(f"{self.name} has no variant {variant!r}; its variants: {known}")
        return replace(self, name=f"{self.name}:{variant}", kind=self.variants[variant], variants={}, variant=variant)

    def placed_in(self, environment: str) -> Implementation:
        """Return the implementation under the torch of another environment: "fast_rnnt@k2".  Raises UserError."""
        if environment not in environments():
            raise UserError(f"{self.name}@{environment}: no such environment; there are {', '.join(environments())}")
        if environment == self.environment:
            return self
        return replace(self, name=f"{self.name}@{environment}", environment=environment, variants={}, placed=True)


#: Variants of the full losses of k2 and of fast_rnnt, from which k2's was made.
OF_K2 = {name: name for name in ("modified", "constrained", "delay-penalty", "hat")}

IMPLEMENTATIONS = (
    Implementation(
        "torchaudio", "benchmark_torchaudio", "main", "torchaudio", variants={"log-probs": "exact", "hat": "hat"}
    ),
    Implementation(
        "optimized_transducer",
        "benchmark_ot",
        "main",
        "optimized_transducer",
        built=True,
        variants={"log-probs": "exact", "modified": "modified-last-blank", "hat": "hat"},
    ),
    Implementation(
        "fast_rnnt", "losses.benchmark_fast_rnnt", "main", "fast_rnnt", built=True, variants=OF_K2, control=True
    ),
    Implementation("k2", "benchmark_k2", "k2", "k2", variants=OF_K2),
    Implementation("warprnnt_numba", "losses.benchmark_warprnnt_numba", "main", "warprnnt_numba"),
    Implementation("nemo", "losses.benchmark_nemo", "nemo", "nemo", variants={"hat": "hat"}),
    Implementation("nemo-triton", "losses.benchmark_nemo_triton", "nemo", "nemo"),
    Implementation("nemo-tdt", "losses.benchmark_nemo_tdt", "nemo", "nemo", kind="tdt", variants={"pytorch": "tdt"}),
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
        "warp-transducer", "losses.benchmark_warp_transducer", "main", "warprnnt_pytorch", variants={"hat": "hat"}
    ),
    Implementation("speechbrain", "losses.benchmark_speechbrain", "main", "speechbrain", variants={"hat": "hat"}),
    Implementation("apex", "losses.benchmark_apex", "main", "apex", variants={"packed": "exact"}),
    Implementation(
        "fused",
        "benchmark_fused",
        "main",
        "fused_transducer",
        variants={"all-cells": "exact", "torch": "exact", **{name: name for name in LATTICES}},
    ),
    Implementation(
        "reference",
        "losses.benchmark_reference",
        "main",
        "torch",
        variants={"compiled": "exact", **{name: name for name in LATTICES}},
        control=True,
    ),
    Implementation(
        "transformers", "losses.benchmark_transformers", "main", "transformers", kind="tdt", variants={"kernel": "tdt"}
    ),
    Implementation("mine", "benchmark_mine", "main", "torch", template=True),
    Implementation(
        "fast_rnnt-pruned",
        "losses.benchmark_fast_rnnt_pruned",
        "main",
        "fast_rnnt",
        built=True,
        kind="pruned",
        control=True,
    ),
    Implementation("k2-pruned", "benchmark_k2_pruned", "k2", "k2", kind="pruned", variants={"hat": "pruned"}),
)

#: The implementations by name: those of the table, and those that common.core.scripts loads from other files.
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


def find(name: str) -> Implementation:
    """Return the implementation of a name as in tables: NAME, NAME:VARIANT, either with @ENVIRONMENT behind it.  Raises
    UserError."""
    called, at, environment = name.partition("@")
    base, _, variant = called.partition(":")
    if base not in BY_NAME:
        raise UserError(f"no implementation is named {base!r}; there are {', '.join(BY_NAME)}")
    implementation = BY_NAME[base].of_variant(variant) if variant else BY_NAME[base]
    return implementation.placed_in(environment) if at else implementation


def environments() -> Tuple[str, ...]:
    """Return the environments that hold an implementation."""
    return tuple(dict.fromkeys(implementation.environment for implementation in IMPLEMENTATIONS))


def with_variants() -> Tuple[Implementation, ...]:
    """Return every implementation, each followed by its variants."""
    result: List[Implementation] = []
    for implementation in BY_NAME.values():
        result += [implementation, *(implementation.of_variant(variant) for variant in implementation.variants)]
    return tuple(result)

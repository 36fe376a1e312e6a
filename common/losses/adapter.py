"""Define the base class of adapters; each implementation has one, in one benchmark_<x>.py.

All that depends on the kind of input of a loss is in losses.layouts.  Does not import torch, so
that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from rnnt_bench.core import implementations
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import BY_NAME, BY_UTTERANCE
from rnnt_bench.core.settings import Settings

if TYPE_CHECKING:
    import torch

    from rnnt_bench.losses.inputs import Labels
    from rnnt_bench.losses.topologies import Topology
    from rnnt_bench.records.schema import Option

#: Attributes of a variant that gives Graves's loss the log-probabilities of a hybrid autoregressive
#: joiner.  A loss that normalises its logits itself leaves those as they are.
HAT: Mapping[str, Any] = {"topology": "hat", "log_probs": True}
#: Variants that all adapters have (rnnt_bench.core.implementations.BY_UTTERANCE).
GENERAL: Mapping[str, Mapping[str, Any]] = {BY_UTTERANCE: {"by_utterance": True}}
#: What variant "cuda" sets: its kernels for CUDA, which a build for the CPU runs
#: (rnnt_bench.setup.simulated).
CUDA: Mapping[str, Any] = {
    "devices": ("cuda",),
    "simulator": {"RNNT_SIMULATED": "1"},
    "simulator_compiled": True,
}


def import_package(package: str, hint: str) -> ModuleType:
    """Import and return a third-party module; raise NotRunnable("missing"), with the hint how to
    get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        itself = error.name == package.partition(".")[0]
        reason = "is not installed" if itself else f"is installed but needs {error.name}"
        raise NotRunnable("missing", f"{package} {reason}: {hint}") from error
    # built for another torch or CUDA
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotRunnable("missing", f"{package} does not import ({line}): {hint}") from error


class Adapter:
    """One implementation under the run's settings.

    The package:
      name: its line in core.implementations, which also has its package and its kind; imports: the
      module that holds `function`, where that is not the package itself; variants: what each
      variant of the line changes here.

    What the loss computes:
      layout: what it takes, one of rnnt_bench.core.implementations.LAYOUTS; topology: its lattice;
      log_probs: it takes log-probabilities, so torch's log_softmax, or what the lattice has in its
      place, is part of `loss`; by_utterance: it gets the logits of one utterance at a time
      (rnnt_bench.losses.layouts.ByUtterance).

    What it can do:
      reductions: those of "sum", "mean" and "none" that the package has; fewest_frames,
      fewest_targets: of the shortest utterance that it answers rightly (1 target where it refuses U
        = 0); takes_many_targets: U may be T and more;
      overwrites_logits: it writes over its input, and its documentation says so; negligible: share
      of an utterance's probability below which it leaves a cell out of the gradient, by design.

    How `function` is called:
      is_module: it is a class, and the constructor takes the options; positional: it takes no
      keywords; repairs: `loss` corrects what the package returns.

    Where it is slow:
      simulator: environment variables under which a package for CUDA alone runs its kernels on the
      CPU, to judge its correctness there; simulator_compiled: they are compiled for it, so that
      conformance asks every corner, where an interpreter would take hours; python_loops: devices
      where Python loops over its cells, which are too many operations for the profiler.
    """

    name: str
    hint: str = "install the package of the loss"
    imports = ""
    variants: Mapping[str, Mapping[str, Any]] = {}
    layout = "padded"
    topology = "regular"
    log_probs = False
    by_utterance = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32",)
    reductions: tuple[str, ...] = ("sum", "mean", "none")
    fewest_frames = 1
    fewest_targets = 0
    takes_many_targets = True
    overwrites_logits = False
    negligible = 0.0
    is_module = False
    positional = False
    repairs = False
    simulator: Mapping[str, str] = {}
    simulator_compiled = False
    python_loops: tuple[str, ...] = ()
    # For the benchmarks; the conformance cases try others.
    blank = 0
    reduction = "sum"

    def __init__(self, settings: Settings, variant: str = ""):
        self.implementation = (
            BY_NAME[self.name].of_variant(variant) if variant else BY_NAME[self.name]
        )
        self.settings, self.prune_range = settings, settings.prune_range
        for attribute, value in {**GENERAL, **self.variants}[variant].items() if variant else ():
            setattr(self, attribute, value)

    # -- the package
    # -------------------------------------------------------------------------------------------------

    def load(self, device: str) -> None:
        """Import the package; raise NotRunnable if it cannot run on `device` ("cpu" or "cuda") or
        in the dtype."""
        if device not in self.devices and not (device == "cpu" and self.simulated):
            reason = f"{self.implementation.name} has no {device} version; it runs on {' and '.join(self.devices)}"
            if self.simulator:
                reason += (
                    f", and for --passes correctness in the simulator of {self.simulator_variables}"
                )
            raise NotRunnable("unsupported", reason)
        if self.settings.dtype not in self.dtypes:
            reason = f"{self.implementation.name} does not take {self.settings.dtype}"
            raise NotRunnable("unsupported", f"{reason}; use --dtype {' or '.join(self.dtypes)}")
        self.module = self.import_module(device)

    def import_module(self, device: str) -> ModuleType:
        """Return the module that holds `function`; build it first if the suite builds this package
        from source."""
        package = self.implementation.package
        if not self.implementation.built:
            return import_package(self.imports or package, self.hint)
        from rnnt_bench.setup import extensions, simulated

        return extensions.load(package, simulated.DEVICE if self.simulated else device)

    def takes(self, shapes: Iterable[tuple[int, int]]) -> bool:
        """Return whether all utterances (T, U) are long enough for it."""
        return all(T >= self.fewest_frames and U >= self.fewest_targets for T, U in shapes)

    def lengthened(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the utterances (T, U), each long enough for it."""
        return [(max(T, self.fewest_frames), max(U, self.fewest_targets)) for T, U in shapes]

    @property
    def lattice(self) -> Topology:
        from rnnt_bench.losses import topologies

        return topologies.of(
            self.topology, self.settings.durations, self.settings.sigma, self.settings.window
        )

    @property
    def simulated(self) -> bool:
        """Return whether this process runs its kernels in a simulator, where times mean nothing."""
        return bool(self.simulator) and self.simulator.items() <= os.environ.items()

    @property
    def simulator_variables(self) -> str:
        """Return the environment variables of the simulator as a shell takes them
        ("TRITON_INTERPRET=1")."""
        return " ".join(f"{name}={value}" for name, value in self.simulator.items())

    def version(self) -> str:
        top = self.module.__name__.partition(".")[0]
        try:
            return str(getattr(sys.modules[top], "__version__", "") or metadata.version(top))
        except metadata.PackageNotFoundError:
            return "unknown"

    # -- the loss
    # ----------------------------------------------------------------------------------------------------

    def outputs(self, vocab_size: int) -> int:
        """Return the number of outputs of the joiner: V, and those that the lattice needs beside
        (durations)."""
        return vocab_size + self.lattice.extra

    def prepare(self, batch: Labels) -> SimpleNamespace:
        """Return the arguments beside the scores, by name, in the package's dtypes, targets first.

        It is not timed, so `batch` has targets, lengths and shapes, and no outputs of encoder and
        decoder.
        """
        raise NotImplementedError

    def function(self) -> Callable[..., Any]:
        """Return the package's function, whose arguments are the scores, those of `prepare` and
        `options`."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return all other arguments of `function`, with defaults of the package that matter
        spelled out."""
        raise NotImplementedError

    def described_options(self) -> dict[str, Option]:
        """Return all options of `function` by name, passed or left at their default."""
        return described(self.function(), self.options())

    def loss(self, logits: torch.Tensor, prepared: SimpleNamespace) -> torch.Tensor:
        """Return the reduced loss of logits in the adapter's layout, which it may overwrite.
        Timed."""
        scores = self.lattice.log_probs(logits, self.blank) if self.log_probs else logits
        return self.loss_of({"logits": scores}, prepared)

    def loss_of(
        self, tensors: Mapping[str, torch.Tensor], prepared: SimpleNamespace
    ) -> torch.Tensor:
        """Return the reduced loss of the `tensors` of the layout (losses.layouts), by name in their
        order."""
        losses = self.call(tensors, prepared)
        return losses if "sum" in self.reductions else self.reduced(losses)

    def call(self, tensors: Mapping[str, torch.Tensor], prepared: SimpleNamespace) -> torch.Tensor:
        """Call the package's function and return its result."""
        function, options, others = self.function(), self.options(), vars(prepared)
        if self.is_module:
            return function(**options)(*tensors.values(), **others)
        if self.positional:
            return function(*tensors.values(), *others.values(), *options.values())
        return function(*tensors.values(), **others, **options)

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses (N,) of utterances as the reduction has them."""
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def but(self, **attributes: Any) -> Adapter:
        """Return a copy with other attributes: prune_range=U + 1 prunes no symbol of at most U
        targets."""
        result = copy.copy(self)
        vars(result).update(attributes)
        return result


def described(
    function: Callable[..., Any], ours: Mapping[str, Any], prefix: str = ""
) -> dict[str, Option]:
    """Return by prefix + name the options we pass, and other parameters with a default, "-" for
    none.

    Left out: parameters that default to None and are not passed, which are tensors, or mean
    nothing.
    """
    from rnnt_bench.records.schema import (
        Option,  # not above: a script starts under a Python without msgspec
    )

    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    others = {
        name: value for name, value in defaults.items() if name not in ours and value is not None
    }
    return {
        prefix + name: Option(_plain(value), _plain(defaults.get(name, "-")))
        for name, value in {**ours, **others}.items()
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: other types by their name, or as text, as infinite
    numbers."""
    is_plain = (
        math.isfinite(value)
        if isinstance(value, float)
        else value is None or isinstance(value, (int, str))
    )
    return value if is_plain else str(getattr(value, "name", value))


class OfFunction(Adapter):
    """The adapter of a function of the user: --loss mypackage.rnnt:loss, or
    assert_is_transducer_loss(loss).

    It is called as ``loss(logits, targets, T_lengths, U_lengths)``: padded logits (N, T, U+1, V),
    the others int32.  It returns the summed loss or the losses (N,).  If it has parameters `blank`
    and `reduction` it gets blank=0 and reduction="sum", so that functions with torchaudio's
    signature work unchanged.
    """

    target = ""  # MODULE:FUNCTION, or FILE.py:FUNCTION
    folders: tuple[str, ...] = ()  # where the module may be, beside Python's own path
    given: Any  # the function, once it is loaded
    hint = "install the package of your loss into the Python that measures it"
    dtypes = ("float32", "float64", "float16", "bfloat16")
    reductions = ("sum",)

    def import_module(self, device: str) -> ModuleType:
        module, _, name = self.target.rpartition(":")
        sys.path += [folder for folder in self.folders if folder not in sys.path]
        of_file = module.endswith(".py")
        loaded: Any = (
            implementations.imported(Path(module)) if of_file else import_package(module, self.hint)
        )
        self.given = functools.reduce(
            lambda owner, part: getattr(owner, part, None), name.split("."), loaded
        )
        if not callable(self.given):
            raise NotRunnable("missing", f"{module} has no function {name}")
        return loaded

    def prepare(self, batch: Any) -> SimpleNamespace:
        return SimpleNamespace(
            targets=batch.targets, T_lengths=batch.T_lengths, U_lengths=batch.U_lengths
        )

    def function(self) -> Callable[..., Any]:
        return self.given

    def options(self) -> dict[str, Any]:
        try:
            parameters: Mapping[str, Any] = inspect.signature(self.function()).parameters
        except (TypeError, ValueError):  # a function in C may not say
            return {}
        ours = {"blank": self.blank, "reduction": self.reduction}
        return {name: value for name, value in ours.items() if name in parameters}

    def call(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        function: Any = self.function()
        options = self.options()
        if inspect.isclass(function):  # a module: its constructor takes the options
            function, options = function(**options), {}
        return function(*tensors.values(), *vars(prepared).values(), **options)

    def loss_of(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        losses = self.call(tensors, prepared)
        return losses.sum() if getattr(losses, "ndim", 0) and self.reduction != "none" else losses

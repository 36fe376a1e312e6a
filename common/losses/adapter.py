"""Define the base class of adapters; each implementation has one, in one benchmark_<x>.py.

All that depends on the kind of input of a loss is in losses.layouts.  This module does not import
torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import copy
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
#: joiner.  A loss that normalises its logits itself leaves log-probabilities as they are.
HAT: Mapping[str, Any] = {"topology": "hat", "log_probs": True}
#: Variants that all adapters have (rnnt_bench.core.implementations.BY_UTTERANCE).
GENERAL: Mapping[str, Mapping[str, Any]] = {BY_UTTERANCE: {"by_utterance": True}}
#: Attributes of a variant that has the package's kernels for CUDA.  To judge them without a GPU, a
#: build for the CPU runs them (rnnt_bench.setup.simulated).
CUDA: Mapping[str, Any] = {
    "devices": ("cuda",),
    "simulator": {"RNNT_SIMULATED": "1"},
    "simulator_compiled": True,
}


def import_package(package: str, hint: str) -> ModuleType:
    """Import and return a third-party module.

    Raises NotRunnable("missing") with `hint`, which says how to get the package."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        reason = f"is installed but needs {error.name}"
        if error.name == package.partition(".")[0]:
            reason = "is not installed"
        raise NotRunnable("missing", f"{package} {reason}: {hint}") from error
    # A package that was built for another torch or CUDA raises one of these.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotRunnable("missing", f"{package} does not import ({line}): {hint}") from error


class Adapter:
    """Call one implementation under the run's settings.

    The package:
      name: of the implementation in core.implementations, which also has its package and kind
      hint: how to get the package
      imports: the module that holds `function`; "" for the package itself
      variants: by name, the attributes that each variant changes

    What the loss computes:
      layout: the kind of its input, one of rnnt_bench.core.implementations.LAYOUTS
      topology: its lattice
      log_probs: whether it takes log-probabilities; then `loss` calls log_softmax, or what the
        lattice has in its place, first
      by_utterance: whether it gets the logits of one utterance at a time (layouts.ByUtterance)

    What it can do:
      devices, dtypes: those that the package runs on, and takes
      reductions: those of "sum", "mean" and "none" that the package has
      fewest_frames, fewest_targets: of the shortest utterance that it answers rightly; 1 target if
        it refuses U = 0
      takes_many_targets: whether U may be T or more
      overwrites_logits: whether it writes over its input, as its documentation says
      negligible: share of an utterance's probability below which it leaves a cell out of the
        gradient, by design

    How `function` is called:
      is_module: whether it is a class, whose constructor takes the options
      positional: whether it takes no keywords
      repairs: whether `loss` corrects what the package returns

    Where it is slow:
      simulator: environment variables under which a package for CUDA alone runs its kernels on the
        CPU, to judge its correctness there
      simulator_compiled: whether its kernels are compiled for that; conformance then asks every
        case, for which an interpreter would take hours
      python_loops: devices where Python loops over its cells, in too many operations to profile
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
    # What is benchmarked; the conformance cases try others.
    blank = 0
    reduction = "sum"

    def __init__(self, settings: Settings, variant: str = ""):
        self.settings = settings
        self.prune_range = settings.prune_range
        self.implementation = BY_NAME[self.name]
        if variant:
            self.implementation = self.implementation.of_variant(variant)
            attributes = {**GENERAL, **self.variants}[variant]
            vars(self).update(attributes)  # in place of the class's

    # -- the package
    # -------------------------------------------------------------------------------------------------

    def load(self, device: str) -> None:
        """Import the package.

        Raises NotRunnable if it is missing, or cannot run on `device` ("cpu" or "cuda") or in the
        dtype of the settings."""
        name = self.implementation.name
        if device not in self.devices and not (device == "cpu" and self.simulated):
            reason = f"{name} has no {device} version; it runs on {' and '.join(self.devices)}"
            if self.simulator:
                simulator = f"in the simulator of {self.simulator_variables}"
                reason += f", and for --passes correctness {simulator}"
            raise NotRunnable("unsupported", reason)
        if self.settings.dtype not in self.dtypes:
            reason = f"{name} does not take {self.settings.dtype}"
            raise NotRunnable("unsupported", f"{reason}; use --dtype {' or '.join(self.dtypes)}")
        self.module = self.import_module(device)

    def import_module(self, device: str) -> ModuleType:
        """Return the module that holds `function`.

        If the suite builds the package from source, build it first."""
        package = self.implementation.package
        if not self.implementation.built:
            return import_package(self.imports or package, self.hint)
        from rnnt_bench.setup import extensions, simulated

        return extensions.load(package, simulated.DEVICE if self.simulated else device)

    def takes(self, shapes: Iterable[tuple[int, int]]) -> bool:
        """Return whether all utterances (T, U) are long enough for the loss."""
        return all(T >= self.fewest_frames and U >= self.fewest_targets for T, U in shapes)

    def lengthened(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the utterances (T, U), with one too short for the loss as long as it must be."""
        return [(max(T, self.fewest_frames), max(U, self.fewest_targets)) for T, U in shapes]

    @property
    def lattice(self) -> Topology:
        """Return the lattice with the parameters of the run."""
        from rnnt_bench.losses import topologies

        return topologies.of(
            self.topology, self.settings.durations, self.settings.sigma, self.settings.window
        )

    @property
    def simulated(self) -> bool:
        """Return whether this process runs the kernels in the simulator, that is, has all variables
        of `simulator`.  Times mean nothing then."""
        return bool(self.simulator) and self.simulator.items() <= os.environ.items()

    @property
    def simulator_variables(self) -> str:
        """Return the environment variables of the simulator as a shell takes them
        ("TRITON_INTERPRET=1")."""
        return " ".join(f"{name}={value}" for name, value in self.simulator.items())

    def version(self) -> str:
        """Return the version of the package; "unknown" if it tells none.  Call `load` before."""
        package = self.module.__name__.partition(".")[0]
        version = getattr(sys.modules[package], "__version__", "")
        try:
            return str(version or metadata.version(package))
        except metadata.PackageNotFoundError:
            return "unknown"

    # -- the loss
    # ----------------------------------------------------------------------------------------------------

    def outputs(self, vocab_size: int) -> int:
        """Return the number of outputs of the joiner: V, and what the lattice needs (durations)."""
        return vocab_size + self.lattice.extra

    def prepare(self, batch: Labels) -> SimpleNamespace:
        """Return targets and lengths as the package takes them, by the names of its arguments.

        They are in the order of these arguments, targets first, since `call` may pass them by
        position.  This is not timed.  So `batch` has no outputs of encoder and decoder, and no work
        on them can be done here.
        """
        raise NotImplementedError

    def function(self) -> Callable[..., Any]:
        """Return the package's function.

        It takes the tensors of the layout, what `prepare` returns, and `options`."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the arguments of `function` besides tensors and what `prepare` returns, by name.

        Defaults of the package that change the loss or its speed are among them."""
        raise NotImplementedError

    def described_options(self) -> dict[str, Option]:
        """Return all options of `function` by name, passed or left at their default."""
        return described(self.function(), self.options())

    def loss(self, logits: torch.Tensor, prepared: SimpleNamespace) -> torch.Tensor:
        """Return the reduced loss of logits in the adapter's layout.  Timed.

        The package may write over the logits.  For one that takes log-probabilities, making them
        counts as a part of its loss."""
        scores = self.lattice.log_probs(logits, self.blank) if self.log_probs else logits
        return self.loss_of({"logits": scores}, prepared)

    def loss_of(
        self, tensors: Mapping[str, torch.Tensor], prepared: SimpleNamespace
    ) -> torch.Tensor:
        """Return the reduced loss.

        A package without the reduction "sum" returns the losses of the utterances, which are
        reduced here.

        tensors: what the loss takes, by the names in `Layout.tensors`."""
        losses = self.call(tensors, prepared)
        return losses if "sum" in self.reductions else self.reduced(losses)

    def call(self, tensors: Mapping[str, torch.Tensor], prepared: SimpleNamespace) -> torch.Tensor:
        """Call the package's function and return its result.

        The tensors are passed in their order.  What `prepare` returned and the options are passed
        by name, or in their order if `positional`."""
        function = self.function()
        options = self.options()
        labels = vars(prepared)
        if self.is_module:
            return function(**options)(*tensors.values(), **labels)
        if self.positional:
            return function(*tensors.values(), *labels.values(), *options.values())
        return function(*tensors.values(), **labels, **options)

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses (N,) of utterances, or their mean or sum, as `reduction` says."""
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def but(self, **attributes: Any) -> Adapter:
        """Return a copy with other values of some attributes.

        For example, with prune_range=U + 1 a pruned loss leaves out no cell of up to U targets."""
        result = copy.copy(self)
        vars(result).update(attributes)
        return result


def described(
    function: Callable[..., Any], ours: Mapping[str, Any], prefix: str = ""
) -> dict[str, Option]:
    """Return the options of a function by prefix + name: each value, and its default ("-" if it has
    none).

    The options are `ours`, which we pass, and the parameters that keep a default.  A default of
    None is left out, since such a parameter is a tensor, or has no effect.
    """
    # Not imported above: a script starts under a Python that may lack msgspec.
    from rnnt_bench.records.schema import Option

    defaults = {
        name: parameter.default
        for name, parameter in signature(function).items()
        if parameter.default is not inspect.Parameter.empty
    }
    kept = {
        name: value for name, value in defaults.items() if name not in ours and value is not None
    }
    return {
        prefix + name: Option(_plain(value), _plain(defaults.get(name, "-")))
        for name, value in {**ours, **kept}.items()
    }


def signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; {} if they are unknown, as for a function in C
    without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it.

    Infinity and NaN become text.  A value that is no number, text or None becomes its `name`, or
    its text if it has no `name`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    is_plain = value is None or isinstance(value, (int, float, str))
    return value if is_plain else str(getattr(value, "name", value))


class OfFunction(Adapter):
    """Call a function of the user: --loss mypackage.rnnt:loss, or assert_is_transducer_loss(loss).

    It is called as ``loss(logits, targets, T_lengths, U_lengths)``: padded logits (N, T, U+1, V),
    the others int32.  It returns the summed loss or the losses (N,).  If it has parameters `blank`
    and `reduction` it gets blank=0 and reduction="sum", so that functions with torchaudio's
    signature work unchanged.
    """

    target = ""  # MODULE:FUNCTION, or FILE.py:FUNCTION
    folders: tuple[str, ...] = ()  # searched for the module after Python's own path
    given: Any  # the function, once it is loaded
    hint = "install the package of your loss into the Python that measures it"
    dtypes = ("float32", "float64", "float16", "bfloat16")
    reductions = ("sum",)

    def import_module(self, device: str) -> ModuleType:
        """Import and return the module of `target`, and set `given` to its function.

        Adds `folders` to sys.path."""
        module, _, name = self.target.rpartition(":")
        sys.path += [folder for folder in self.folders if folder not in sys.path]
        if module.endswith(".py"):
            loaded = implementations.imported(Path(module))
        else:
            loaded = import_package(module, self.hint)
        self.given = loaded
        for part in name.split("."):
            self.given = getattr(self.given, part, None)
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
        parameters = signature(self.function())
        ours = {"blank": self.blank, "reduction": self.reduction}
        return {name: value for name, value in ours.items() if name in parameters}

    def call(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        function: Any = self.function()
        options = self.options()
        if inspect.isclass(function):  # a class of modules takes options when it is made
            function, options = function(**options), {}
        labels = vars(prepared)  # targets and lengths, in the order in which `prepare` names them
        return function(*tensors.values(), *labels.values(), **options)

    def loss_of(self, tensors: Mapping[str, Any], prepared: SimpleNamespace) -> Any:
        losses = self.call(tensors, prepared)
        # A function that ignores `reduction` returns the losses (N,), which are summed here, unless
        # each is asked for.  It may return no tensor at all: `step.checked_sum` says so.
        return losses.sum() if getattr(losses, "ndim", 0) and self.reduction != "none" else losses

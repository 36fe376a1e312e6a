"""What an implementation must say of itself, and the step that all which take logits share.

An adapter is one class in one benchmark_<x>.py.  It names itself, loads the real package, turns a batch into what the
package wants (untimed) and names the function that is timed and its options.  Losses that take more than logits (the
pruned ones) override `logits` and `step`.  No torch at import, so that ``--help`` is fast.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Tuple

from common.errors import NotRunnable
from common.implementations import BY_NAME
from common.losses.options import described
from common.losses.stages import stage

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from common.losses.inputs import Batch
    from common.losses.joiner import Joiner
    from common.settings import Settings


def import_package(package: str, hint: str) -> ModuleType:
    """The third-party module, or NotRunnable("missing") with the hint how to get it; never a traceback."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise NotRunnable("missing", f"{package} is installed but needs {error.name}: {hint}") from error
        raise NotRunnable("missing", f"{package} is not installed: {hint}") from error
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # built for another torch or CUDA
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotRunnable("missing", f"{package} does not import ({line}): {hint}") from error


class Adapter:
    """One implementation under the run's settings.

    name: its line in common.implementations, which also says its package and its kind (of a script that has none see
    common.scripts); hint: how a user installs it; layout: what `loss` takes: "padded" (logits (N, T, U+1, V)), "packed"
    (logits of every utterance's own cells, (sum T_i (U_i+1), V)), "pruned" or "additive" (see the classes of these
    names); devices, dtypes: what it takes; reductions: of "sum", "mean" and "none", those it has; fewest_targets: 1
    where it refuses U = 0; log_probs: it takes log-probabilities, so that a log_softmax is part of `loss`;
    overwrites_logits: it writes over them, and its documentation says so; is_module: `function` is a class whose
    constructor takes the options; positional: `function` takes no keywords; repairs: `loss` is more than the call of
    `function`, see `unrepaired`; topology: the lattice, see common.losses.reference; simulator: environment variables
    under which a package for CUDA alone runs its kernels on the CPU, thread by thread, so that its correctness can be
    judged there; python_loops: devices where Python loops over its cells, which are too many operations for a profiler
    to keep; variants: what each variant in common.implementations sets of all this.
    """

    name: str
    hint: str
    layout = "padded"
    devices: Tuple[str, ...] = ("cpu", "cuda")
    dtypes: Tuple[str, ...] = ("float32",)
    reductions: Tuple[str, ...] = ("sum", "mean", "none")
    fewest_targets = 0
    log_probs = False
    overwrites_logits = False
    is_module = False
    positional = False
    repairs = False
    topology = "regular"
    simulator: Mapping[str, str] = {}
    python_loops: Tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = {}
    # What the benchmarks use; conformance.py tries others.
    blank = 0
    reduction = "sum"

    def __init__(self, settings: Settings, variant: str = ""):
        implementation = BY_NAME[self.name].of_variant(variant) if variant else BY_NAME[self.name]
        self.settings = settings
        self.package = implementation.package
        self.kind = implementation.kind
        for attribute, value in self.variants[variant].items() if variant else ():
            setattr(self, attribute, value)

    def load(self, device: str) -> None:
        """Import the package; raise NotRunnable when it cannot run on `device` ("cpu" or "cuda") or in the dtype."""
        if device not in self.devices and not (device == "cpu" and self.simulated):
            reason = f"{self.name} has no {device} version; it runs on {' and '.join(self.devices)}"
            if self.simulator:
                reason += f", and for --passes correctness in the simulator of {self.simulator_variables}"
            raise NotRunnable("unsupported", reason)
        if self.settings.dtype not in self.dtypes:
            raise NotRunnable(
                "unsupported",
                f"{self.name} does not take {self.settings.dtype}; use --dtype {' or '.join(self.dtypes)}",
            )
        self.module = self.import_module(device)

    def import_module(self, device: str) -> ModuleType:
        return import_package(self.package, self.hint)

    @property
    def simulated(self) -> bool:
        """Whether this process runs its kernels in a simulator: right or wrong shows there, a time says nothing."""
        return bool(self.simulator) and self.simulator.items() <= os.environ.items()

    @property
    def simulator_variables(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.simulator.items())

    def version(self) -> str:
        """Of the package that was loaded: what it says itself, or else its distribution."""
        top = self.module.__name__.partition(".")[0]
        try:
            return str(getattr(sys.modules[top], "__version__", "") or metadata.version(top))
        except metadata.PackageNotFoundError:
            return "unknown"

    def weights(self, device: torch.device, dtype: torch.dtype) -> Dict[str, torch.nn.Module]:
        """Layers of its own beside the joiner's, trained by its step."""
        return {}

    def prepare(self, batch: Batch) -> SimpleNamespace:
        """What the package wants beside logits (targets, lengths, in its dtypes), by parameter name.  Untimed."""
        raise NotImplementedError

    def function(self) -> Callable[..., torch.Tensor]:
        """The package's function of logits, what `prepare` returns and `options`."""
        raise NotImplementedError

    def options(self) -> Dict[str, Any]:
        """Everything else that is passed to `function`, its own defaults spelled out where they matter."""
        raise NotImplementedError

    def described_options(self) -> Dict[str, Dict[str, Any]]:
        """{name: {"ours", "default"}} of everything that `function` was told or leaves at its authors' default."""
        return described(self.function(), self.options())

    def loss(self, logits: torch.Tensor, prepared: SimpleNamespace) -> torch.Tensor:
        """The reduced loss.  Timed.  `logits` may be overwritten: every sample gets its own."""
        if self.log_probs:
            logits = logits.log_softmax(-1)
        if self.is_module:
            return self.function()(**self.options())(logits, **vars(prepared))
        if self.positional:
            return self.function()(logits, *vars(prepared).values(), *self.options().values())
        return self.function()(logits, **vars(prepared), **self.options())

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """`losses` (N,) of a package without reductions (its only one is "none"), summed for the benchmarks."""
        return losses if self.reduction == "none" else losses.sum()

    def unrepaired(self) -> Adapter:
        """A copy whose `loss` is what the package returns for each of its `reductions`, without what the adapter makes
        good (`repairs`) so that the benchmarks measure the transducer loss."""
        result = copy.copy(self)
        result.repairs = False
        return result

    def logits(self, model: Joiner, batch: Batch, prepared: SimpleNamespace) -> torch.Tensor:
        """The logits that scope `loss` is given.  Untimed there; part of the step."""
        return model.logits(batch, self.layout)

    def step(self, model: Joiner, batch: Batch, prepared: SimpleNamespace) -> torch.Tensor:
        """From encoder and decoder outputs to the summed loss that is differentiated.  Timed."""
        with stage("joiner"):
            logits = self.logits(model, batch, prepared)
        with stage("loss"):
            return self.loss(logits, prepared)

    # -- correctness -----------------------------------------------------------------------------------------------

    def widened(self, U: int) -> Adapter:
        """The adapter under which its result must equal the exact loss, for at most `U` targets: itself if it does not
        prune."""
        return self

    def take(self, logits: torch.Tensor, batch: Batch, prepared: SimpleNamespace) -> torch.Tensor:
        """Padded logits (N, T, U+1, V) as `loss` takes them."""
        from common.losses import layouts

        return layouts.pack(logits, batch.shapes) if self.layout == "packed" else logits

    def expected(self, given: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(N,) losses that `given`, what `loss` takes as float64 on the CPU, must lead to; differentiable."""
        from common.losses import layouts, reference

        cells = layouts.unpack(given, batch.shapes) if self.layout == "packed" else given
        return reference.losses(cells, batch.targets, batch.shapes, self.blank, self.topology)

    def expected_step(self, model: Joiner, batch: Batch) -> torch.Tensor:
        """What `step` must return, in float64 on the CPU, for a float64 `model` and `batch`; differentiable."""
        from common.losses import reference

        logits = model.logits(batch, "padded")
        return reference.losses(logits, batch.targets, batch.shapes, self.blank, self.topology).sum()

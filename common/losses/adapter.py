"""What an implementation must say of itself, and the step that all which take logits share.

An adapter is one class in one benchmark_<x>.py.  It names itself, loads the real package, turns a batch into what the
package wants (untimed) and calls the loss (timed).  Losses that take more than logits (the pruned ones) override
`logits` and `step`.  No torch at import, so that ``--help`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Dict, Tuple

from common.errors import NotRunnable
from common.implementations import BY_NAME
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

    name: its line in common.implementations, which also says its package and whether it is exact; hint: how a user
    installs it; layout: "padded" (logits (N, T, U+1, V)) or "packed" (logits of every utterance's own cells, (sum T_i
    (U_i+1), V)); devices, dtypes: what it takes.
    """

    name: str
    hint: str
    layout = "padded"
    devices: Tuple[str, ...] = ("cpu", "cuda")
    dtypes: Tuple[str, ...] = ("float32",)
    fewest_targets = 0

    def __init__(self, settings: Settings):
        self.settings = settings
        self.package = BY_NAME[self.name].package
        self.exact = BY_NAME[self.name].exact

    def load(self, device: str) -> None:
        """Import the package; raise NotRunnable when it cannot run on `device` ("cpu" or "cuda") or in the dtype."""
        if device not in self.devices:
            raise NotRunnable(
                "unsupported", f"{self.name} has no {device} version; it runs on {' and '.join(self.devices)}"
            )
        if self.settings.dtype not in self.dtypes:
            raise NotRunnable(
                "unsupported",
                f"{self.name} does not take {self.settings.dtype}; use --dtype {' or '.join(self.dtypes)}",
            )
        self.module = self.import_module(device)

    def import_module(self, device: str) -> ModuleType:
        return import_package(self.package, self.hint)

    def version(self) -> str:
        """Of the package that was loaded."""
        return str(getattr(self.module, "__version__", "") or "unknown")

    def weights(self, device: torch.device, dtype: torch.dtype) -> Dict[str, torch.nn.Module]:
        """Layers of its own beside the joiner's, trained by its step."""
        return {}

    def prepare(self, batch: Batch) -> Any:
        """What the package wants beside logits (targets, lengths, in its dtypes).  Untimed."""
        raise NotImplementedError

    def loss(self, logits: torch.Tensor, prepared: Any) -> torch.Tensor:
        """The summed loss, a scalar.  Timed.  `logits` may be overwritten: every sample gets its own."""
        raise NotImplementedError

    def logits(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """The logits that scope `loss` is given.  Untimed there; part of the step."""
        return model.logits(batch, self.layout)

    def step(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """From encoder and decoder outputs to the summed loss that is differentiated.  Timed."""
        with stage("joiner"):
            logits = self.logits(model, batch, prepared)
        with stage("loss"):
            return self.loss(logits, prepared)

    # -- correctness -----------------------------------------------------------------------------------------------

    def widened(self, U: int) -> Adapter:
        """The adapter under which its result must equal the exact loss, for at most `U` targets: itself if it is
        exact."""
        return self

    def expected_step(self, model: Joiner, batch: Batch) -> torch.Tensor:
        """What `step` must return, in float64 on the CPU, for a float64 `model` and `batch`; differentiable."""
        from common.losses import reference

        return reference.losses(model.logits(batch, "padded"), batch.targets, batch.shapes).sum()

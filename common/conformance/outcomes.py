"""Define the records of `check`: a row for each implementation, with its outcome in each case."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from rnnt_bench.core.text import finite

Result = Literal["pass", "differs", "refuses", "crashes", "timeout", "n/a", "error"]
RESULTS = get_args(Result)
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_ASKED, ERROR = RESULTS
#: End of the message of a loss that passes because it is infinite as it must be, although its
#: gradient is NaN.
NAN_GRADIENT = "gradient up to nan"
#: Beginning of the message of a loss that passes because it is right in float64.
IMPRECISE = "imprecise: "
JUDGED = "judged"


class Outcome(Struct, frozen=True, omit_defaults=True):
    """Hold the result of a case for one implementation.

    Attributes:
        message: one line.
        loss_error: relative; None if the loss was not compared.  An error that is infinite or NaN
            becomes text.UNBOUNDED, since JSON has neither.
        grad_error: relative to the largest entry; None if the gradient was not compared.
    """

    result: Result
    message: str = ""
    loss_error: float | None = None
    grad_error: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss_error", "grad_error"):
            error = getattr(self, name)
            # The struct is frozen.  `finite` puts UNBOUNDED in place of infinity and NaN.
            force_setattr(self, name, None if error is None else finite(error))


class Row(Struct, omit_defaults=True):
    """Hold the outcomes of an implementation.

    Attributes:
        kind: one of implementations.KINDS.
        status: "judged"; or "missing", "unsupported", or "error" if the suite failed.
        reason: why it was not judged.
        version: of the package.
        torch: the version of torch.
        device_name: of the GPU, or the model name of the CPU.
        simulator: the environment variables under which kernels for CUDA ran on a CPU.
        cells: outcomes by the name of the case.
    """

    name: str
    kind: str
    status: str = JUDGED
    reason: str = ""
    version: str | None = None
    torch: str | None = None
    device_name: str | None = None
    simulator: str | None = None
    cells: dict[str, Outcome] = {}
